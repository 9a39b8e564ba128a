"""How many protocol transitions one process makes in a second, without and with the ledger.

    python benchmarks/protocol_throughput.py [--json]

What is counted and how is said in `staleflow.experiments.protocol_rate`, which does the measuring.
"""

from __future__ import annotations

import argparse
import json
import sys

from staleflow.experiments.protocol_rate import KINDS, measure


def main(arguments: list[str]) -> int:
    """Measure and print; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description="Protocol transitions a second.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--transitions", type=int, default=20_000, help="in a replay")
    parser.add_argument("--repeats", type=int, default=25, help="replays of each kind")
    chosen = parser.parse_args(arguments)
    result = measure(chosen.transitions, chosen.repeats)
    if chosen.json:
        print(json.dumps(result))
    else:
        print(f"{result['transitions']:,} transitions: {result['mix']}")
        print(f"{'per second of':<21}{'CPU, median':>12}{'best':>10}{'wall, median':>14}{'goal':>9}")
    met = True
    for name in KINDS:
        row = result[name]
        met = met and row["per_cpu_s"] >= (row["goal"] or 0)
        if not chosen.json:
            goal = f"{row['goal']:,}" if row["goal"] else ""
            print(
                f"{name:<21}{row['per_cpu_s']:>12,}{row['per_cpu_s_best']:>10,}{row['per_wall_s']:>14,}{goal:>9}"
            )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
