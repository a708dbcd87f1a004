// The C ABI of elastic/step.h and elastic/samples.h: translation only.
#include "base/without_memory.h"

#include <new>
#include <utility>
#include <variant>

#include "elastic/samples.h"
#include "elastic/step.h"
#include "include/ringtrain.h"

using ringtrain::Contributors;
using ringtrain::Samples;
using ringtrain::Standing;
using ringtrain::StepEffects;
using ringtrain::Steps;

struct rt_steps {
  explicit rt_steps(bool several) : steps(several) {}
  Steps steps;
  StepEffects effects;
  size_t given = 0;  // of them
};
struct rt_samples {
  Samples samples;
  std::vector<int64_t> positions;  // drawn last
};

namespace {

constexpr int32_t kAll = -1;

Contributors In(const int32_t* places, int32_t count) {
  if (count == kAll) return {};
  return std::vector<int32_t>(places, places + count);
}

int32_t Out(const Contributors& contributors, const int32_t** places) {
  *places = contributors ? contributors->data() : nullptr;
  return contributors ? static_cast<int32_t>(contributors->size()) : kAll;
}

template <typename Act>
int32_t WithEffects(rt_steps* steps, Act act) {
  steps->effects.clear();
  steps->given = 0;
  return Done([&] { act(&steps->effects); });
}

struct IntoEffect {
  rt_step_effect* effect;
  void operator()(const ringtrain::step_effect::Finish& finish) {
    effect->count = Out(finish.contributors, &effect->places);
  }
  void operator()(const ringtrain::step_effect::Deal& deal) {
    effect->world = deal.world;
    effect->size = deal.size;
    effect->place = deal.place;
  }
  template <typename Other>
  void operator()(const Other&) {}
};

}  // namespace

rt_steps* rt_steps_open(int32_t several) { return new (std::nothrow) rt_steps(several != 0); }
void rt_steps_free(rt_steps* steps) { delete steps; }
void rt_steps_begin(rt_steps* steps) { steps->steps.Begin(); }
void rt_steps_begin_part(rt_steps* steps) { steps->steps.BeginPart(); }
void rt_steps_hold(rt_steps* steps, int32_t part) { steps->steps.Hold(static_cast<ringtrain::Part>(part)); }
void rt_steps_drop(rt_steps* steps) { steps->steps.Drop(); }

int32_t rt_steps_release(rt_steps* steps) {
  return WithEffects(steps, [&](StepEffects* effects) { steps->steps.Release(effects); });
}

int32_t rt_steps_settle(rt_steps* steps, const int32_t* places, int32_t count) {
  return WithEffects(
      steps, [&](StepEffects* effects) { steps->steps.Settle(std::vector<int32_t>(places, places + count), effects); });
}

int32_t rt_steps_next(rt_steps* steps, rt_step_effect* effect) {
  if (steps->given == steps->effects.size()) return 0;
  const ringtrain::StepEffect& next = steps->effects[steps->given++];
  effect->kind = static_cast<int32_t>(next.index());
  std::visit(IntoEffect{effect}, next);
  return 1;
}

int32_t rt_steps_has_end_to_come(rt_steps* steps) { return steps->steps.has_end_to_come(); }

int32_t rt_steps_enter_world(rt_steps* steps, int64_t number, int32_t size, int32_t place) {
  return Done([&] { steps->steps.EnterWorld(number, size, place); });
}

void rt_steps_standing(rt_steps* steps, int32_t has_sets, int64_t* row) {
  const Standing own = steps->steps.standing(has_sets != 0);
  const int64_t told[] = {own.holds_state, own.released, static_cast<int64_t>(own.stage), own.dealt_in, own.has_sets};
  for (const int64_t each : told) *row++ = each;
}

int32_t rt_steps_hear(rt_steps* steps, const int64_t* rows, int32_t count, int32_t* place) {
  return Or<int32_t>(-1, [&] {
    std::vector<Standing> standings;
    for (const int64_t* row = rows; row < rows + 5 * count; row += 5)
      standings.push_back({row[0] != 0, row[1], static_cast<ringtrain::Stage>(row[2]), row[3], row[4] != 0});
    const bool can_be = steps->steps.Hear(standings);
    *place = steps->steps.place_in_dealing().value_or(-1);
    return int32_t{can_be};
  });
}

void rt_steps_took_state(rt_steps* steps) { steps->steps.TookState(); }
int64_t rt_steps_released(rt_steps* steps) { return steps->steps.released(); }
int32_t rt_steps_stage(rt_steps* steps) { return static_cast<int32_t>(steps->steps.stage()); }

int32_t rt_steps_contributors(rt_steps* steps, const int32_t** places) {
  return Out(steps->steps.contributors(), places);
}

// ---- samples ----

rt_samples* rt_samples_open(int32_t cut, int64_t count, int64_t batch, int32_t drops_last, int64_t next,
                            const int64_t* given_back, int64_t given_back_count) {
  return Or<rt_samples*>(nullptr, [&] {
    const ringtrain::SamplePlan plan = {static_cast<ringtrain::Cut>(cut), count, batch, drops_last != 0};
    return new rt_samples{Samples(plan, next, std::vector<int64_t>(given_back, given_back + given_back_count)), {}};
  });
}

void rt_samples_free(rt_samples* samples) { delete samples; }

void rt_samples_look(rt_samples* samples, rt_samples_state* state) {
  const Samples& of = samples->samples;
  *state = {of.next(),
            of.left(),
            of.draws_left(),
            of.taken(),
            of.drawn(),
            of.batch(),
            of.size(),
            of.place(),
            of.given_back().data(),
            static_cast<int64_t>(of.given_back().size())};
}

void rt_samples_deal(rt_samples* samples, int32_t size, int32_t place) { samples->samples.Deal(size, place); }
int32_t rt_samples_share(rt_samples* samples, const int64_t* parts, int32_t count) {
  return Or<int32_t>(-1, [&] { return samples->samples.Share({parts, parts + count}), 1; });
}

int32_t rt_samples_cost(rt_samples* samples, const int64_t* costs, int64_t count) {
  return Or<int32_t>(-1, [&] { return samples->samples.Cost({costs, costs + count}), 1; });
}

void rt_samples_forget_ahead(rt_samples* samples) { samples->samples.ForgetAhead(); }

int64_t rt_samples_draw_ahead(rt_samples* samples, const int64_t** positions) {
  return Or<int64_t>(-1, [&] {
    samples->positions = samples->samples.DrawAhead();
    *positions = samples->positions.data();
    return static_cast<int64_t>(samples->positions.size());
  });
}

int64_t rt_samples_take(rt_samples* samples, int64_t draws) {
  return Or<int64_t>(-1, [&] { return samples->samples.Take(draws); });
}

int64_t rt_samples_shares_left(rt_samples* samples) {
  return Or<int64_t>(-1, [&] { return samples->samples.shares_left(); });
}

int32_t rt_samples_release(rt_samples* samples, const int32_t* places, int32_t count) {
  return Or<int32_t>(-1, [&] { return samples->samples.Release(In(places, count)), 1; });
}

int64_t rt_samples_weight(rt_samples* samples, const int32_t* places, int32_t count) {
  return Or<int64_t>(-1, [&] { return samples->samples.Weight(In(places, count)); });
}

int64_t rt_samples_work(rt_samples* samples) {
  return Or<int64_t>(-1, [&] { return samples->samples.Work(); });
}
