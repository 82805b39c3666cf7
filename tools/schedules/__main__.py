"""`python -m tools.schedules [--seeds FROM:TO] [--shrink]`: run schedules of faults and print what breaks a law."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tools.schedules.search import Case, run, shrink


def main() -> int:
    """Run the cases; return 1 if one broke a law."""
    parser = argparse.ArgumentParser(prog="python -m tools.schedules", description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="FROM:TO", help="the cases; one number is one case")
    parser.add_argument("--mode", choices=("asynchronous", "synchronous"), help="of all cases; by default both")
    parser.add_argument("--whole", action="store_true", help="whole peers, with noise, codecs and rules against liars")
    parser.add_argument("--shrink", action="store_true", help="print the smallest case that breaks the same law")
    parser.add_argument("--stop", type=int, default=0, metavar="N", help="end after so many broken cases")
    options = parser.parse_args()
    first, colon, last = options.seeds.partition(":")
    seeds = range(int(first), int(last) if colon else int(first) + 1)

    faults: Counter[str] = Counter()
    named: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    events = 0
    seconds = 0.0
    virtual = 0.0
    for seed in seeds:
        case = Case.whole(seed) if options.whole else Case.drawn(seed, options.mode)
        outcome = run(case)
        faults += outcome.faults
        named += outcome.named
        ends += outcome.ends
        events += outcome.events
        seconds += outcome.seconds
        virtual += outcome.virtual
        if not outcome.broken:
            continue

        broken[outcome.law] += 1
        print(f"seed {seed}: {outcome.broken}")
        if options.shrink:
            case, outcome = shrink(case, outcome)
            print(f"  at the smallest: {outcome.broken}")
        parts = "" if case.settings is None else ", " + " ".join(case.settings)
        size = f"{case.n_peers} peers, {case.rounds} rounds"
        print(f"  {case.kind}, {case.mode}, {size}, {case.graph}, {case.network}{parts}")
        print("  " + case.schedule.to_yaml().replace("\n", "\n  ").rstrip())
        print(f"  again: {case.command}{' --shrink' if options.shrink else ''}", flush=True)
        if options.stop and sum(broken.values()) >= options.stop:
            break

    print(f"{len(seeds)} schedules, {events:,} events, {virtual:,.0f} virtual s, {seconds:.1f} CPU s")
    print(f"faults: {dict(faults.most_common())}")
    print(f"mass by name: {dict(named.most_common())}")
    print(f"ends: {dict(ends.most_common())}")
    print(f"broken: {dict(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
