"""`python -m staleflow.audit RUN_OR_LEDGER...`: exit code 0 clean, 3 violations, 2 wrong arguments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from staleflow.audit.checker import audit_ledger

EXIT_VIOLATION = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit each run and print the report."""
    parser = argparse.ArgumentParser(prog="python -m staleflow.audit", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN_OR_LEDGER", help="run folder or ledger file")
    parser.add_argument("--json", action="store_true", help="one JSON object per run")
    chosen = parser.parse_args(arguments)
    clean = True
    for run in chosen.runs:
        report = audit_ledger(run)
        clean = clean and report.ok
        if chosen.json:
            print(json.dumps({"run": run, "ok": report.ok, **asdict(report)}))
        else:
            print(f"{run}\n{report.text()}")
    return 0 if clean else EXIT_VIOLATION


if __name__ == "__main__":
    sys.exit(main())
