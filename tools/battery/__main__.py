"""Try the rows of a covering array: `python -m tools.battery --strength 3 --seed 7 --minutes 10`."""

from __future__ import annotations

import argparse
import sys
import time

from tools.battery.battery import stale_lines, sweep, text_of
from tools.battery.refused import known, read, write


def main() -> None:
    """Grow an array of a strength by a seed; exit with 1 if a row breaks a law."""
    parser = argparse.ArgumentParser(prog="python -m tools.battery", description=sys.modules[__name__].__doc__)
    parser.add_argument("--strength", type=int, default=2, choices=(1, 2, 3), help="2 for pairs, 3 for triples")
    parser.add_argument("--seed", type=int, default=1, help="of the order in which rows are grown")
    parser.add_argument("--rows", type=int, help="the most to try")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fresh", action="store_true", help="find out again what refused.txt has")
    parser.add_argument("--learn", action="store_true", help="build the rows only, and write refused.txt")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    lines = [] if options.fresh else read()
    stale = stale_lines(lines, options.seed)
    for line in stale:
        print(f"stale in refused.txt: {line.code}: {text_of(line.parts[0])} and {len(line.parts) - 1} more")
    before = known([line for line in lines if line not in stale])
    report = sweep(
        options.strength,
        options.seed,
        rows=options.rows,
        known=before,
        builds_only=options.learn,
        until=lambda: time.monotonic() > end,
        say=lambda text: print(text, flush=True),
    )
    print(report)
    for code, count in report.refusals.most_common():
        print(f"{count:6d}  {code}")
    if options.learn:
        write({**before, **report.reasons})
    if report.violations or (stale and not options.learn):
        sys.exit(1)


if __name__ == "__main__":
    main()
