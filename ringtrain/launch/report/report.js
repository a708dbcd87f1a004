"use strict";
// Draws what page.py has left in the page: the picture of a step, the bars of all ranks, the steps one after the other.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1130, LEFT = 74, AXIS = 22;
const DETAILED = 8; // up to so many ranks, each kind has a lane of its own

function element(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function timeText(microseconds) {
  if (Math.abs(microseconds) < 1e3) return `${+microseconds.toPrecision(3)} µs`;
  if (microseconds < 1e6) return `${+(microseconds / 1e3).toPrecision(3)} ms`;
  return `${+(microseconds / 1e6).toPrecision(3)} s`;
}

function fresh(id, height) {
  const place = document.getElementById(id);
  place.replaceChildren();
  return element("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img" }, place);
}

// About `count` round numbers between two moments.
function ticks(from, to, count) {
  const rough = (to - from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function legend(id, names) {
  for (const name of names) {
    const item = document.createElement("span"), colour = document.createElement("i");
    colour.style.background = data.colours[name];
    item.append(colour, name);
    document.getElementById(id).append(item);
  }
}

// ---- the picture of one step ----

let shown, range;

function drawPicture() {
  const detailed = shown.rows.length <= DETAILED;
  const computing = detailed ? 14 : 5, lane = detailed ? 7 : 5, gap = detailed ? 12 : 3;
  const lanes = detailed ? data.kinds.length : 1;
  const row = computing + lanes * lane + gap;
  const svg = fresh("picture", shown.rows.length * row + AXIS + 8);
  const [from, to] = range, scale = (WIDTH - LEFT) / (to - from);
  const x = (time) => LEFT + (Math.min(Math.max(time, from), to) - from) * scale;
  const height = shown.rows.length * row;
  for (const at of ticks(from, to, 9)) {
    element("line", { x1: x(at), x2: x(at), y1: 0, y2: height + 8, stroke: "#e6eaf0" }, svg);
    element("text", { x: Math.min(x(at), WIDTH - 20), y: height + 21, "text-anchor": "middle" }, svg, timeText(at));
  }
  shown.rows.forEach((each, number) => {
    const top = 4 + number * row;
    const bar = (name, begin, end, y, tall) => {
      if (end <= from || begin >= to || end <= begin) return;
      const made = element("rect", { x: x(begin), y, width: Math.max(x(end) - x(begin), 0.5), height: tall,
        fill: data.colours[name], "data-kind": name, "data-rank": each.rank }, svg);
      element("title", {}, made, `rank ${each.rank}: ${name}, ${timeText(end - begin)} from ${timeText(begin)}`);
    };
    const every = shown.rows.length <= 32 ? 1 : 4;
    if (number % every === 0)
      element("text", { x: LEFT - 8, y: top + (detailed ? 12 : row - gap), "text-anchor": "end" }, svg, `rank ${each.rank}`);
    data.computing.forEach((name, part) => bar(name, each.borders[part], each.borders[part + 1], top, computing));
    for (let at = 0; at < each.waited.length; at += 2) bar("waiting", each.waited[at], each.waited[at + 1], top, computing);
    data.kinds.forEach((name, kind) => {
      const y = top + computing + (detailed ? 1 + kind * lane : 0);
      for (let at = 0; at < each.kinds[kind].length; at += 2)
        bar(name, each.kinds[kind][at], each.kinds[kind][at + 1], y, detailed ? lane - 1 : lane);
    });
  });
  let start = null;
  const time = (event) => {
    const place = svg.getBoundingClientRect();
    return from + ((event.clientX - place.left) * WIDTH / place.width - LEFT) / scale;
  };
  svg.addEventListener("mousedown", (event) => { start = time(event); event.preventDefault(); });
  svg.addEventListener("mouseup", (event) => {
    if (start === null) return;
    const [begin, end] = [start, time(event)].sort((one, other) => one - other);
    start = null;
    if (end - begin > (to - from) / 200) show(shown, [Math.max(begin, from), Math.min(end, to)]);
  });
  svg.addEventListener("dblclick", () => show(shown));
}

function show(picture, part) {
  shown = picture;
  range = part || [0, picture.length];
  drawPicture();
}

// ---- where a mean step of each rank goes ----

function drawRanks() {
  const tall = data.ranks.length <= 16 ? 16 : 7, gap = data.ranks.length <= 16 ? 6 : 2;
  const most = Math.max(...data.ranks.map((each) => each.parts.reduce((sum, part) => sum + part, 0)));
  const height = data.ranks.length * (tall + gap);
  const svg = fresh("ranks", height + AXIS + 4);
  const scale = (WIDTH - LEFT) / (most || 1);
  for (const at of ticks(0, most || 1, 9)) {
    element("line", { x1: LEFT + at * scale, x2: LEFT + at * scale, y1: 0, y2: height + 4, stroke: "#e6eaf0" }, svg);
    element("text", { x: Math.min(LEFT + at * scale, WIDTH - 20), y: height + 20, "text-anchor": "middle" }, svg, timeText(at));
  }
  data.ranks.forEach((each, number) => {
    const y = 4 + number * (tall + gap);
    if (data.ranks.length <= 32 || number % 4 === 0)
      element("text", { x: LEFT - 8, y: y + tall - (tall > 10 ? 4 : 0), "text-anchor": "end" }, svg, `rank ${each.rank}`);
    let at = LEFT;
    each.parts.forEach((part, index) => {
      const made = element("rect", { x: at, y, width: Math.max(part * scale, 0), height: tall,
        fill: data.colours[data.parts[index]] }, svg);
      element("title", {}, made, `rank ${each.rank}: ${data.parts[index]}, ${timeText(part)}`);
      at += part * scale;
    });
  });
}

// ---- the steps one after the other ----

function drawSteps() {
  const height = 130, bottom = height - AXIS, count = data.steps.length;
  const svg = fresh("steps", height);
  const sorted = [...data.steps].sort((one, other) => one - other);
  const most = Math.min(sorted[count - 1], 4 * sorted[count >> 1]) * 1.05 || 1;  // one long step does not flatten all
  const wide = (WIDTH - LEFT) / count;
  for (const at of ticks(0, most, 3)) {
    const y = bottom - at / most * bottom;
    element("line", { x1: LEFT, x2: WIDTH, y1: y, y2: y, stroke: "#e6eaf0" }, svg);
    if (y > 8) element("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, svg, timeText(at));
  }
  data.steps.forEach((each, number) => {
    const tall = Math.min(each / most, 1) * bottom;
    const made = element("rect", { x: LEFT + number * wide, y: bottom - tall, width: Math.max(wide - (wide > 3 ? 1 : 0), 0.5),
      height: tall, fill: each > most ? "#c2410c" : "#5b87c7" }, svg);
    element("title", {}, made, `step ${number}: ${timeText(each)}`);
  });
  for (const at of ticks(0, Math.max(count - 1, 1), 10).filter(Number.isInteger))
    element("text", { x: LEFT + (at + 0.5) * wide, y: height - 6, "text-anchor": "middle" }, svg, String(at));
}

const select = document.getElementById("step");
data.pictures.forEach((picture, number) => select.append(new Option(picture.name, String(number))));
select.addEventListener("change", () => show(data.pictures[Number(select.value)]));
document.getElementById("whole").addEventListener("click", () => show(shown));
legend("legend-picture", [...data.computing, "waiting", ...data.kinds]);
legend("legend-ranks", data.parts);
show(data.pictures[0]);
drawRanks();
drawSteps();
document.body.dataset.drawn = "yes";
