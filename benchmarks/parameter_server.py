"""A push and pull pair against two plain copies of the same bytes, in the same run.

    python benchmarks/parameter_server.py [--mb 256] [--pairs 15] [--directory /dev/shm] [--json]

What is measured is said in `staleflow.experiments.transfer`, which does the measuring.
"""

from __future__ import annotations

import argparse
import json

from staleflow.experiments.transfer import GOAL, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="megabytes of weights")
    parser.add_argument("--pairs", type=int, default=15, help="pairs measured")
    parser.add_argument("--directory", default="/dev/shm", help="folder in memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.mb, options.pairs, options.directory)
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{options.mb} MB: two plain copies {result['plain_s']:.3f} s,"
            f" push and pull {result['push_pull_s']:.3f} s, ratio {result['ratio']:.3f} (goal: <= {GOAL})"
        )


if __name__ == "__main__":
    main()
