"""A synthetic run folder: long curves, several instances, a ledger that its metrics agree with."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def run_writer() -> MakeRun:
    """The writer itself, for runs that a whole module shares."""
    return write_run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "run", **changes: Any) -> Path:
        return write_run(tmp_path / name, **changes)

    return make


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path,
    *,
    bound: int = 1,
    steps: int = 40,
    instances: int = 2,
    batch: int = 4,
    group: int = 4,
    seed: int = 0,
    policy: str = "staleflow",
    cause: str = "rollout",
    recorded: bool = True,
) -> Path:
    """Write metrics.jsonl, ledger.jsonl and config.yaml of a finished run.

    `cause`: what the trainer waits for. `recorded=False`: as runs were before their rows had `time/...`.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    step_s = 3.0 - 0.4 * min(bound, 3) + 0.02 * seed
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = [
        {
            "kind": "start",
            "bound": bound,
            "batch_size": batch,
            "group_size": group,
            "last_batch": "train",
            "spare_limit": 0,
        }
    ]
    total = {"generated": 0, "trained": 0, "filtered": 0, "aborted": 0, "discarded": 0, "in_flight": 0}
    rows.append(
        {
            "kind": "event",
            "time": 1e9,
            "run/seconds": 3.0,
            "event/name": "verifier killed",
            "event/text": "took > 5 s",
        }
    )
    for step in range(steps):
        lags = sorted((min(step, bound, int(rng.expovariate(1.0))) for _ in range(batch)), reverse=True)
        groups: list[dict[str, Any]] = []
        trained: list[dict[str, Any]] = []
        for g, lag in enumerate(lags):
            group_id = f"e0-p{step * batch + g}-a0"
            members = []
            for m in range(group):
                item = {"id": f"{group_id}-m{m}", "hash": f"{rng.getrandbits(64):016x}"}
                members.append(item)
                tokens = 12 + min(69, int(rng.expovariate(1 / 12)))
                trained.append({**item, "min": step - lag, "max": step, "tokens": tokens})
            groups.append({"group": group_id, "version": step - lag, "trajectories": members})
            records.append({"kind": "reserve", "group": group_id, "version": step - lag, "spare": False})
            records.append({"kind": "occupy", "group": group_id})
        records.append({"kind": "consume", "buffer": step, "final": False, "groups": groups})
        records.append({"kind": "trained", "step": step, "version": step, "trajectories": trained})
        tokens = sum(t["tokens"] for t in trained)
        total["trained"] += tokens
        total["filtered"] += tokens // 4
        total["aborted"] += step % 3
        total["in_flight"] = 300
        total["generated"] = sum(v for k, v in total.items() if k != "generated")
        end = (step + 1) * step_s
        for half in (0.5, 1.0):
            rows.append(_sample(end - (1 - half) * step_s, step, instances, bound, half, rng))
        if step % 5 == 0:
            rows.append(_evaluation(step, end, bound, rng))
        rows.append(
            {
                "kind": "train",
                "time": 1e9 + end,
                "train/step": step,
                "run/seconds": end,
                "staleness/mean": sum(lags) / batch,
                "staleness/max": max(lags),
                "staleness/min": min(lags),
                "staleness/violations": 0,
                **{
                    f"buffer/{o}/occupied": max(0, batch - 2 * o - rng.randrange(2)) for o in range(bound + 1)
                },
                **{f"buffer/{o}/reserved": min(batch, rng.randrange(2) + (o > 0)) for o in range(bound + 1)},
                "rollout/reward_mean": 0.5 + 0.2 * (1 - math.exp(-step / 15)) + rng.gauss(0, 0.03),
                "rollout/response_len_mean": tokens / len(trained),
                "rollout/tokens_per_s": 900 + rng.gauss(0, 60),
                "train/loss": rng.gauss(0, 0.02),
                "train/grad_norm": abs(rng.gauss(1, 0.2)),
                "train/entropy": 0.6 * math.exp(-step / 60) + rng.gauss(0, 0.01),
                "train/kl": 0.01 * bound + abs(rng.gauss(0, 0.003)),
                "train/clip_frac": abs(rng.gauss(0.02 * (1 + bound), 0.01)),
                "train/logprob_abs_diff": 0.02 * (1 + bound),
                "timing_s/wait_for_batch": step_s - 1.4,
                "timing_s/update": 1.1,
                "timing_s/push": 0.04,
                "timing_s/pull": 0.08,
                "timing_s/reward": 0.2,
                **{f"tokens/{k}": v for k, v in total.items()},
                **(_recorded(step_s, instances, cause, trained, rng) if recorded else {}),
            }
        )
    records.append({"kind": "end", "steps": steps, "reason": "completed"})
    rows.append(_evaluation(steps, steps * step_s, bound, rng))
    rows.append(
        {
            "kind": "summary",
            "time": 1e9,
            "run/seconds": steps * step_s,
            "run/steps": steps,
            "run/reason": "completed",
            "run/cpu_cores": 2,
            **{f"tokens/{k}": v for k, v in total.items()},
        }
    )
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "ledger.jsonl", [{"seq": i, "attempt": 0, **r} for i, r in enumerate(records)])
    config = {
        "run": {"name": folder.name, "steps": steps, "seed": seed},
        "staleness": {"bound": bound},
        "data": {"batch_size": batch, "group_size": group},
        "coordination": {"policy": policy},
        "rollout": {"instances": instances, "threads": 1},
        "training": {"threads": 1},
        "reward": {"workers": 1},
        "cluster": {"address": None},
    }
    (folder / "config.yaml").write_text("# staleflow 0.1.0\n" + yaml.safe_dump(config))
    return folder


def _recorded(
    step_s: float, instances: int, cause: str, trained: list[dict[str, Any]], rng: random.Random
) -> dict[str, Any]:
    """What a step's row says of its time, its commands and its lengths."""
    waiting, idle = step_s - 1.16, 0.08 + 0.04 * rng.random()
    if cause == "longest":
        idle += 0.4
    lengths: dict[str, Any] = {}
    for item in trained:
        for kind, tokens in (("trained", item["tokens"]), ("sampled", item["tokens"] + 3)):
            key = f"lengths/{kind}/{1 << (tokens.bit_length() - 1)}"
            lengths[key] = lengths.get(key, 0) + 1
            lengths[f"lengths/{kind}/mean"] = lengths.get(f"lengths/{kind}/mean", 0) + tokens / len(trained)
    causes = ("rollout", "longest", "reward", "pull", "routing", "environment")
    return {
        "time/step_s": step_s,
        "time/instances_s": instances * step_s,
        "time/instances_idle_s": idle * instances * step_s,
        "time/instances_idle_training_s": 0.03 * instances * step_s,
        "time/decoding_s": (0.88 - idle) * instances * step_s,
        "time/trainer_waiting_s": waiting,
        **{f"time/waiting/{c}_s": waiting * (0.9 if c == cause else 0.02) for c in causes},
        **{f"coord/{kind}_seconds": 0.01 * step_s for kind in ("route", "interrupt", "abort")},
        "coord/pull_count": instances,
        "coord/interrupt_count": 2,
        "coord/migrate_count": 1,
        "coord/seconds": 0.004 * step_s,
        "rollout/preemptions": 0,
        **lengths,
    }


def _sample(
    seconds: float, step: int, instances: int, bound: int, half: float, rng: random.Random
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": "instances",
        "time": 1e9,
        "run/seconds": seconds,
        "trainer/busy": int(half == 0.5),
    }
    for i in range(instances):
        row[f"instance/{i}/version"] = max(0, step - (i % 2 if bound else 0))
        row[f"instance/{i}/running"] = 0 if rng.random() < 0.25 / (1 + bound) else rng.randrange(4, 17)
        row[f"instance/{i}/waiting"] = rng.randrange(2)
        row[f"instance/{i}/kv_usage"] = rng.random()
        row[f"instance/{i}/tokens_per_s"] = 400.0
    return row


def _evaluation(version: int, seconds: float, bound: int, rng: random.Random) -> dict[str, Any]:
    value = 0.53 + 0.17 * (1 - math.exp(-version / 20)) - 0.004 * bound + rng.gauss(0, 0.008)
    return {
        "kind": "eval",
        "time": 1e9 + seconds,
        "eval/weight_version": version,
        "run/seconds": seconds,
        "eval/heldout/avg@1": value,
        "eval/heldout_greedy/avg@1": 0.96,
        "eval/heldout/prompts": 500,
    }
