"""bin/faults: draws plans, performs them some at a time, and prints what is wrong with each. See `drawn`."""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from drawn.draw import pairs_of, plans, possible_pairs, smaller
from drawn.known import why_excused
from drawn.laws import problems
from drawn.outcome import Outcome
from drawn.perform import Machine
from drawn.plan import Plan, parse

AT_ONCE = 4  # most of a job's time is waiting


def main(arguments: list[str]) -> int:
    """Returns 0 if every job kept every law, or is excused."""
    options = read(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's is ignored, and so would the jobs'
    with Machine(frozenset(options.without)) as machine:
        if options.plan:
            wanted: Iterable[Plan] = map(parse, options.plan)
        else:
            print(f"bin/faults: seed {options.seed}", flush=True)
            wanted = itertools.islice(plans(options.seed, machine.cannot), options.first, options.count)
        pairs, count, broken = possible_pairs(machine.cannot), 0, 0
        for plan, outcome in performed(machine, wanted, options.minutes, options.at_once):
            count, pairs = count + 1, pairs - pairs_of(plan)
            broken += report(plan, outcome, options.verbose)
            if options.shrink and is_broken(plan, outcome):
                print(f"  shrunk to: {shrunk(machine, plan, set(problems(plan, outcome)))}", flush=True)
    print(f"bin/faults: {count} jobs, {broken} of them broke a law; {len(pairs)} pairs of values were in none")
    return int(broken > 0)


def read(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="bin/faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no job begins later (for ever)")
    parser.add_argument("--count", type=int, default=None, help="no more jobs than these")
    parser.add_argument("--first", type=int, default=0, help="number of the first plan of the seed's sequence")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of the sequence of plans (drawn)")
    parser.add_argument("--plan", action="append", help="this plan instead, as a failure prints it; may be given again")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help=f"jobs at a time ({AT_ONCE})")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="VALUE",
        help="leave plans with this value out, such as mpich or 1+1",
    )
    parser.add_argument("--shrink", action="store_true", help="look for a plainer plan that breaks the same law")
    parser.add_argument("--verbose", action="store_true", help="print what each job wrote")
    return parser.parse_args(arguments)


def performed(machine: Machine, wanted: Iterable[Plan], minutes: float, at_once: int) -> Iterator[tuple[Plan, Outcome]]:
    """Plans with their outcomes, as they end."""
    deadline = time.monotonic() + 60 * minutes
    coming = iter(wanted)
    with ThreadPoolExecutor(at_once) as pool:
        under_way: dict[Future, Plan] = {}
        while True:
            while len(under_way) < at_once and time.monotonic() < deadline and (plan := next(coming, None)) is not None:
                under_way[pool.submit(machine.perform, plan)] = plan
            if not under_way:
                return
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(done), done.result()


def report(plan: Plan, outcome: Outcome, verbose: bool) -> bool:
    """Prints a job; returns whether it broke a law without an excuse."""
    broken = is_broken(plan, outcome)
    print(f"{'BROKEN' if broken else 'kept  '} {outcome.seconds:5.1f} s  {plan}", flush=True)
    for law, problem in problems(plan, outcome).items():
        reason = why_excused(plan, law, problem)
        print(f"    {law}: {problem}" + (f"\n    excused: {reason}" if reason else ""), flush=True)
    if verbose:
        print(f"    {outcome.brief()}", flush=True)
    if broken:
        print(f"    again: bin/faults --plan {str(plan)!r}", flush=True)
    return broken


def is_broken(plan: Plan, outcome: Outcome) -> bool:
    """Whether a job broke a law for which there is no excuse."""
    return any(not why_excused(plan, law, problem) for law, problem in problems(plan, outcome).items())


def shrunk(machine: Machine, plan: Plan, laws: set[str]) -> Plan:
    """A plan that breaks one of the same laws, and of which no plainer one does."""
    for plainer in smaller(plan):
        if laws & set(problems(plainer, machine.perform(plainer))):
            return shrunk(machine, plainer, laws)
    return plan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
