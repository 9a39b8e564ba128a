"""The journal file: what happened to each trajectory and each part, and when. One JSON object a line.

`telemetry.journal` writes it.

Invariants:

- a line is whole or absent, as in the ledger; opening an existing journal removes its torn tail and nothing
  else, so that a resumed attempt appends;
- what is older than a second has been handed to the operating system, as long as anything goes on;
- it repeats nothing that the ledger says: a `ledger` line gives the time of the record of that number;
- the loop never waits for it, and no decision depends on it.

Every line has `t`, seconds of the run's clock since the attempt began, and `k`, its kind. Times are those at
which the loop learned of a thing. Keys: `i` instance, `n` its incarnation, `q` sequence number of a command,
`id` trajectory, `g` group, `l` length in tokens (prompt and response), `v` weight version, `s` seconds,
`why` a reason. A key that has nothing to say is left out.

========= ====================================================================================
kind      further keys
========= ====================================================================================
begin     a attempt, step the one it begins with, wall seconds since the epoch
join      i n v, cap tokens its KV cache holds, max most trajectories decoded at once
lost      i n why, back [[id, l], ...] what returned to the trajectory server
draw      g, m [id, ...] its members, l
route     i n q id, v least version to run it, ad reserve or lower, av at which V, sp 1 as a spare, l why
interrupt i n q id l why
abort     i n q id l why
pull      i n q v why
report    i n, v loaded, q acknowledged, s stood still for pulls since the last report line
reject    i n q id (none: a pull) why, stale 1 for a route that came before its version
back      i id l, v oldest version of its tokens, runs [[version, tokens], ...] (-1: given tokens)
done      i id l v runs, end finish reason
load      i, r running, w waiting, kv tokens cached, cap, pre preemptions since the incarnation started
external  id, s limit: its environment answers later
given     id l: its environment added tokens
score     id, raw, st status, s
gave_up   id why
release   ids [id, ...] why
resample  id why, to id of the trajectory that takes its place in the group and starts anew
cut       id why: complete as it is, though it would have gone on
ledger    q number of the record
batch     step, s waited for by the trainer
trained   step, u seconds of the update, p seconds that it waited for the push of the weights it started
          from, before it could change them (0: it waited for none)
push      v, s seconds of the push
eval      v s
save      v s
finish    why
========= ====================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staleflow.errors import RunFolderError

Line = dict[str, Any]
"""One line as a mapping; the table in the module's docstring has its keys."""


def read_journal(path: Path) -> Iterator[Line]:
    """Yield each whole line in order, `a` (the attempt) added to it; a torn last line is left out.

    Raises RunFolderError naming file and line when a whole line is none of a journal, or there is no file.
    """
    attempt = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line: Line = json.loads(text)
                    attempt = line["a"] if line["k"] == "begin" else attempt
                    float(line["t"])
                except (ValueError, KeyError, TypeError) as error:
                    raise RunFolderError(f"{path}, line {number}: not a journal line ({error})") from error
                line["a"] = attempt
                yield line
    except OSError as error:
        raise RunFolderError(f"cannot read the journal {path}: {error.strerror}") from error
