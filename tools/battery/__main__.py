"""Try rows of a covering array: `python -m tools.battery --strength 3 --seed 7 --minutes 10`."""

from __future__ import annotations

import argparse
import sys
import time

from tools.battery.battery import sweep


def main() -> None:
    """Grow an array of a strength by a seed; exit with 1 if a row breaks a law."""
    parser = argparse.ArgumentParser(prog="python -m tools.battery", description=sys.modules[__name__].__doc__)
    parser.add_argument("--strength", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    report = sweep(
        options.strength,
        options.seed,
        rows=options.rows,
        until=lambda: time.monotonic() > end,
        say=lambda text: print(text, flush=True),
    )
    print(report)
    for code, count in report.refusals.most_common():
        print(f"{count:6d}  {code}")
    if report.violations:
        sys.exit(1)


if __name__ == "__main__":
    main()
