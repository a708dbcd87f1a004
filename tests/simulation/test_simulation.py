"""The protocol in thousands of simulated worlds (tests/simulation), and proof that the simulation would find faults.

And what decides in an elastic job, in thousands of simulated jobs (tests/simulation/elastic).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATION = Path(__file__).parent
sys.path[:0] = [str(SIMULATION.with_name("native")), str(SIMULATION)]
import elastic_mutants
import mutants

import build

LONG_SECONDS = 3600
# Ranks: seeds. Where a world of 4096 ranks is aborted they tell each other in 16 million frames, which takes minutes and
# 10 GB here; seed 6 comes to its end without.
LARGE_WORLDS = {1024: "1-2", 4096: "6-6"}
MOST_SEEDS, MOST_JOBS = 2000, 12000  # until a mutant must be caught
pytestmark = pytest.mark.timeout(1200)  # the first test may have to build


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder with the simulators, compiled once."""
    return build.build("plain", list(build.SIMULATIONS))


@pytest.fixture(scope="module")
def with_mutants(programs: Path) -> Path:
    """The same folder, with those that have planted faults: half of what there is to compile."""
    return build.build("plain", build.SIMULATORS)


def simulate(program: Path, *arguments: object) -> tuple[int, str]:
    """Exit code and output of a run."""
    done = subprocess.run([program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def check(program: Path, *arguments: object) -> str:
    """The output of a run that must find nothing."""
    code, said = simulate(program, *arguments)
    assert code == 0, said
    return said


# Of what decides in an elastic job: what the product calls, and the simulation does not, and why.
NOT_SIMULATED = {
    "ListensAt": "an address is a name there",
    "members": "looks at what is there",
    "Drop": "an error that no other world mends ends the rank",
    "has_end_to_come": "of several optimizers, in tests/native/step_test.cc",
    "shares_left": "looks at what is there",
    "Work": "how fast a rank is: in tests/core/test_constant_batches.py",
    "ForgetAhead": "a loader that begins anew, in tests/core/test_elastic_order.py",
    "ProcessCame": "where an engine starts the processes: in tests/native/authority_test.cc",
    "ProcessGone": "as ProcessCame",
}


def test_what_a_job_decides_is_simulated() -> None:
    """Ranks and simulation call the same, so that nothing ships of which the invariants say nothing."""
    product = "".join(path.read_text() for path in (build.ROOT / "native" / "c_api").glob("*.cc"))
    simulated = "".join(path.read_text() for path in (SIMULATION / "elastic").glob("*.[ch]*"))
    calls = {"membership", "steps", "samples", "authority"}
    shipped = {call for name in calls for call in re.findall(rf"\b{name}->{name}\.(\w+)\(", product)}
    shipped |= set(re.findall(r"\bmembership\.membership\.(\w+)\(", product))
    driven = {call for name in calls for call in re.findall(rf"\b{name}_?(?:\.|->)(\w+)\(", simulated)}
    assert len(shipped) > 30 and shipped - driven == NOT_SIMULATED.keys()


@pytest.mark.parametrize("table", [mutants.MUTANTS, elastic_mutants.MUTANTS], ids=["protocol", "elastic"])
def test_mutants_are_of_the_sources_as_they_are(table: list[mutants.Mutant]) -> None:
    """Which only bin/test --long compiles."""
    for file in mutants.sources(table):
        assert mutants.mutated(table, file, (build.ROOT / file).read_text()).count(mutants.AWAKE.partition("{")[0]) > 0


def test_cases_that_found_something(programs: Path) -> None:
    check(programs / "simulate", "--cases", SIMULATION / "cases.txt")


def test_first_seeds(programs: Path) -> None:
    check(programs / "simulate", "--seeds", "1-1200")


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + 600)
def test_seeds_that_nobody_has_seen(programs: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    check(programs / "simulate", "--seeds", f"{seed}-{seed}", "--seconds", LONG_SECONDS)


@pytest.mark.parametrize("ranks", [1024, pytest.param(4096, marks=pytest.mark.long)])
def test_large_worlds(ranks: int, programs: Path) -> None:
    check(programs / "simulate", "--size", ranks, "--seeds", LARGE_WORLDS[ranks])


def costs(programs: Path, *arguments: object) -> dict[str, dict]:
    """What agreement costs 64 ranks of 8 hosts, by the kind of step."""
    said = check(programs / "simulate_scale", "--ranks", 64, "--without-code", "--json", *arguments)
    return {line["step"]: line for line in map(json.loads, said.splitlines())}


def test_what_agreement_costs(programs: Path) -> None:
    """Of 64 ranks the coordinator speaks with all."""
    steps = costs(programs, "--schedule", "off")
    assert steps["steady"]["messages"] == steps["steady"]["busiest_rank_messages"] == 3 * 63
    assert steps["changed"]["microseconds"] < 300


def test_what_a_steady_step_costs_by_a_schedule(programs: Path) -> None:
    """A frame each way between neighbouring hosts, and none within one; whatever changes is agreed on as before."""
    steps = costs(programs)
    assert steps["steady"]["messages"] == steps["steady"]["messages_between_hosts"] == 2 * 7
    assert steps["steady"]["microseconds"] < 70
    assert steps["changed"]["messages"] > 3 * 63


def test_drawn_delays_take_longer_and_the_same_frames(programs: Path, tmp_path: Path) -> None:
    """Of a delay in four that is long a wide world meets one at each level of its tree."""
    delays = tmp_path / "delays"
    delays.write_text("1\n1\n1\n200\n")
    steady, drawn = costs(programs)["steady"], costs(programs, "--delays", delays)["steady"]
    assert drawn["messages"] == steady["messages"]
    assert steady["microseconds"] + 200 < drawn["microseconds"] < steady["microseconds"] + 1000


@pytest.mark.parametrize(
    ("hosts", "size", "steps"), [(4, 100_000, 2), (16, 100_000, 2), (20, 100_000, 10), (64, 1024, 12)]
)
def test_small_sums_take_few_steps_between_hosts(programs: Path, hosts: int, size: int, steps: int) -> None:
    """Each step costs its latency, which is all that counts here."""
    said = check(programs / "simulate_collectives", "--hosts", hosts, "--bytes", size, "--latency-us", 1e6, "--json")
    times = {line["way"]: line["microseconds"] / 1e6 for line in map(json.loads, said.splitlines())}
    assert times["ring"] == pytest.approx(2 * (hosts - 1), abs=0.1)
    assert times["chosen"] == pytest.approx(steps, abs=0.1)


def test_a_seed_replays_bit_for_bit(programs: Path) -> None:
    first, again, other = (check(programs / "simulate", "--case", f"seed={seed} size=6") for seed in (5, 5, 6))
    digest = re.compile("digest [0-9a-f]{16}")
    assert first == again
    assert digest.findall(first) != digest.findall(other)


@pytest.mark.long
def test_each_mutant_is_caught(with_mutants: Path) -> None:
    said = check(with_mutants / "simulate_mutants", "--mutants", "--seeds", f"1-{MOST_SEEDS}", "--size", "2-8")
    assert len(re.findall("caught", said)) == len(mutants.MUTANTS) >= 15


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant_name", ["a join keeps what the member is owed", "other hosts hear of no end", "silence is no death"]
)
def test_a_failure_shrinks_and_replays(mutant_name: str, with_mutants: Path) -> None:
    """A planted fault is printed with a case of few turns and ranks that shows it again, in the same words each time."""
    mutant = ["--mutant", mutant_name]
    code, said = simulate(with_mutants / "simulate_mutants", *mutant, "--seeds", "1-200", "--size", "2-8")
    assert code == 1
    small, violation = re.search(r"shrunk to: (.*)\n(.*)\n", said).groups()
    turns = re.search("turns=([0-9,]*)", small)[1].split(",")
    assert len(turns) <= 4 and re.search(r"^[23] ranks", said, re.MULTILINE)
    code, again = simulate(with_mutants / "simulate_mutants", *mutant, "--case", small)
    assert code == 1 and violation in again
    check(with_mutants / "simulate", "--case", small)  # without the mutant nothing is wrong with it


def test_a_mutant_that_no_longer_fits_is_told() -> None:
    with pytest.raises(ValueError, match="Adapt the table in tests/simulation"):
        mutants.mutated(mutants.MUTANTS, mutants.MUTANTS[0].file, "int main() {}")


def test_a_mutant_that_cuts_a_statement_is_told() -> None:
    """The switch around it would not compile, which only bin/test --long does."""
    half = [mutants.Mutant("half", "a.cc", "a < b) return;", "true) return;")]
    with pytest.raises(ValueError, match="'half' begins or ends within brackets"):
        mutants.mutated(half, "a.cc", "if (a < b) return;")


def test_first_elastic_jobs(programs: Path) -> None:
    check(programs / "simulate_elastic", "--seeds", "1-1000")


@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + 600)
def test_elastic_jobs_that_nobody_has_seen(programs: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    check(programs / "simulate_elastic", "--seeds", f"{seed}-{seed}", "--seconds", LONG_SECONDS)


def test_an_elastic_job_replays_bit_for_bit(programs: Path) -> None:
    first, again, other = (check(programs / "simulate_elastic", "--seed", seed) for seed in (5, 5, 6))
    digest = re.compile("digest [0-9a-f]{16}")
    assert first == again
    assert digest.findall(first) != digest.findall(other)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_each_elastic_mutant_is_caught(with_mutants: Path) -> None:
    said = check(with_mutants / "simulate_elastic_mutants", "--mutants", "--seeds", f"1-{MOST_JOBS}")
    assert len(re.findall("caught", said)) == len(elastic_mutants.MUTANTS) >= 44


@pytest.mark.long
def test_an_elastic_failure_is_printed_with_few_faults(with_mutants: Path) -> None:
    mutant = ["--mutant", "a part that one rank holds is released"]
    code, said = simulate(with_mutants / "simulate_elastic_mutants", *mutant, "--seeds", "1-200")
    assert code == 1
    seed, violation = re.search(r"seed (\d+): (.*)\n", said).groups()
    faults = re.search("--faults '([0-9,]*)'", said)[1]
    assert len(faults.split(",")) <= 2
    code, again = simulate(with_mutants / "simulate_elastic_mutants", *mutant, "--seed", seed, "--faults", faults)
    assert code == 1 and violation in again
    check(with_mutants / "simulate_elastic", "--seed", seed, "--faults", faults)
