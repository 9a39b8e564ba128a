"""Every metric that a run records: one table, from which consoles, reports, W&B axes and the docs are made.

Adding a metric takes two edits: the code that puts its value into a row, and one line in the table here.
docs/metrics.md is generated from it: `staleflow metrics > docs/metrics.md`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from staleflow.telemetry.metric import Metric, OverSteps
from staleflow.telemetry.rows import Row, RowKind

AXES: Mapping[RowKind, str] = {
    "train": "train/step",
    "eval": "eval/weight_version",
    "instances": "run/seconds",
}
"""The metric over which each kind of row is drawn; every such row has it. Other kinds are not drawn."""

GROUPS, TOKENS = "rollout/groups", "train/tokens"
"""Weights of means over trajectories and over tokens in the loss."""


def _row(
    kinds: tuple[RowKind, ...], name: str, unit: str, over_steps: OverSteps, meaning: str, **shown: Any
) -> Metric:
    return Metric(name=name, kinds=kinds, unit=unit, over_steps=over_steps, meaning=meaning, **shown)


_step = partial(_row, ("train",))
_both = partial(_row, ("train", "summary"))
"""A train row has the figure of its step; the summary has that of the whole attempt."""
_end = partial(_row, ("summary",))
_sample = partial(_row, ("instances",))
_eval = partial(_row, ("eval",))
_event = partial(_row, ("event",))

_TABLE = (
    _row(("train", "eval", "instances", "event", "summary"), "run/seconds", "s", "last",
         "Seconds since this attempt began, on the run's clock."),
    _end("run/steps", "steps", "last", "Training steps done, those of earlier attempts included."),
    _end("run/reason", "", "none", "Why the run ended, such as `completed` or `interrupted`."),
    _end("run/cpu_cores", "cores", "last", "CPU cores of the machine that ran the loop."),
    _event("event/name", "", "none", "What happened, in one word, such as `instance_down`."),
    _event("event/text", "", "none", "What happened, in one sentence."),

    _step("staleness/mean", "versions", "mean", "Mean lag of the trained trajectories: the training step "
          "minus the oldest weight version of their tokens.", weight=GROUPS),
    _step("staleness/max", "versions", "max", "Largest lag of a trained trajectory; at most the bound.",
          label="staleness", digits=0),
    _step("staleness/min", "versions", "min", "Smallest lag of a trained trajectory."),
    _step("staleness/violations", "trajectories", "sum", "Trained trajectories whose lag exceeds the bound; "
          "always 0."),
    _step("staleness/in_flight/mean", "versions", "mean", "Mean lag of the groups being generated, behind "
          "the version just pushed."),
    _step("staleness/in_flight/max", "versions", "max", "Largest lag of a group being generated."),
    _step("staleness/in_queue/mean", "versions", "mean", "Mean lag of the groups that wait for training, "
          "behind the version just pushed."),
    _step("staleness/in_queue/max", "versions", "max", "Largest lag of a group that waits for training."),
    _step("buffer/<offset>/reserved", "groups", "mean", "Groups placed in the buffer that are still being "
          "generated or scored."),
    _step("buffer/<offset>/occupied", "groups", "mean", "Groups in the buffer that are ready for training."),

    _step("rollout/reward_mean", "score", "mean", "Mean raw reward of the batch, without trajectories that "
          "the verifier could not judge. Not recorded by simulated runs in which every answer is right.",
          weight=GROUPS, label="reward", digits=3),
    _step("rollout/response_len_mean", "tokens", "mean", "Mean response length of the batch.",
          weight=GROUPS, label="length", digits=1, title="mean response length", curve=True),
    _step("rollout/response_len_max", "tokens", "max", "Longest response of the batch."),
    _step("rollout/truncated_ratio", "share", "mean", "Share of the batch that was cut off at "
          "rollout.max_new_tokens.", weight=GROUPS),
    _step("rollout/partial_ratio", "share", "mean", "Share of the batch whose tokens are of several weight "
          "versions.", weight=GROUPS),
    _step("rollout/groups", "groups", "sum", "Groups in the batch."),
    _step("rollout/tokens_per_s", "tokens/s", "mean", "Generated tokens per second since the last step.",
          weight="time/step_s", label="generated", digits=0, title="generated tokens/s", curve=True),
    _step("rollout/wasted_tokens", "tokens", "sum", "Generated tokens that were filtered, aborted or "
          "discarded since the last step."),
    _step("rollout/filtered_groups", "groups", "sum", "Groups released because their rewards teach nothing.",
          title="groups filtered", figure="groups_filtered"),
    _step("rollout/failed_groups", "groups", "sum", "Groups released because no member is usable.",
          title="groups failed", figure="groups_failed"),
    _step("rollout/expired_groups", "groups", "sum", "Spare groups released because no step can use them.",
          title="spare groups expired", figure="groups_expired"),
    _step("rollout/surplus_members", "trajectories", "sum", "Redundant members aborted because their group "
          "was complete.", title="surplus members aborted", figure="members_aborted"),
    _step("rollout/straggler_retried", "trajectories", "sum", "Stragglers dropped and sampled anew.",
          title="stragglers resampled", figure="stragglers_retried"),
    _step("rollout/straggler_truncated", "trajectories", "sum", "Stragglers cut off where they were.",
          title="stragglers truncated", figure="stragglers_cut"),
    _both("rollout/preemptions", "preemptions", "sum", "Trajectories that engines put back because their KV "
          "cache was full.", title="preemptions", figure="preemptions"),
    _both("lengths/sampled/<bucket>", "trajectories", "sum", "Trajectories whose generation ended, by "
          "response length."),
    _both("lengths/trained/<bucket>", "trajectories", "sum", "Trajectories trained on, by response length."),
    _both("lengths/sampled/mean", "tokens", "mean", "Mean response length of the trajectories whose "
          "generation ended.", weight="lengths/sampled/<bucket>"),
    _both("lengths/trained/mean", "tokens", "mean", "Mean response length of the trajectories trained on.",
          weight="lengths/trained/<bucket>"),
    _both("lengths/cut", "trajectories", "sum", "Trajectories whose generation was cut off: aborted, "
          "expired, truncated as stragglers or given up."),
    _end("prompt_lengths/sampled/<bucket>", "trajectories", "last", "Trajectories whose generation ended, "
         "by prompt length."),
    _end("prompt_lengths/trained/<bucket>", "trajectories", "last", "Trajectories trained on, by prompt "
         "length."),
    _end("prompt_lengths/sampled/mean", "tokens", "last", "Mean prompt length of the trajectories whose "
         "generation ended."),
    _end("prompt_lengths/trained/mean", "tokens", "last", "Mean prompt length of the trajectories trained "
         "on."),
    _step("reward/timeout_count", "trajectories", "sum", "Trajectories whose verifier exceeded its time "
          "limit."),
    _step("reward/error_count", "trajectories", "sum", "Trajectories whose verifier failed."),

    _step("train/step", "", "last", "The training step; it turned weight version `train/step` into the "
          "next one."),
    _step("train/loss", "", "mean", "Mean loss of the step's optimizer updates.",
          label="loss", digits=4, title="loss", curve=True),
    _step("train/grad_norm", "", "mean", "Mean norm of the gradient before clipping, over the step's "
          "updates.", title="gradient norm", curve=True),
    _step("train/entropy", "nats", "mean", "Mean entropy of the policy at the sampling temperature, per "
          "token.", weight=TOKENS, title="entropy", curve=True),
    _step("train/kl", "nats", "mean", "Behaviour KL, per token: k3 estimate of KL(behaviour || policy at the "
          "step's start).", weight=TOKENS, title="KL to the behaviour policy", curve=True),
    _step("train/reference_kl", "nats", "mean", "k3 estimate of KL(policy || reference model), per token; "
          "with training.kl.coefficient above 0.", weight=TOKENS),
    _step("train/clip_frac", "share", "mean", "Share of tokens where the clip decided the loss.",
          weight=TOKENS, title="clipped share", curve=True),
    _step("train/logprob_abs_diff", "nats", "mean", "Mean absolute difference between the log-probs of "
          "policy and behaviour at the step's start.", weight=TOKENS, title="|log-prob difference|",
          curve=True),
    _step("train/correction_weight_mean", "", "mean", "Mean weight that the correction for staleness gives "
          "a token; 1 without weights.", weight=TOKENS),
    _step("train/correction_masked_frac", "share", "mean", "Share of tokens that the correction gives "
          "weight 0.", weight=TOKENS),
    _step("train/informative_ratio", "share", "mean", "Share of tokens whose advantage is not 0.",
          weight=TOKENS),
    _step("train/tokens", "tokens", "sum", "Tokens in the loss."),
    _step("train/trajectories", "trajectories", "sum", "Trajectories with tokens in the loss."),
    _step("train/masked_trajectories", "trajectories", "sum", "Trajectories of the batch without a token in "
          "the loss, such as failed ones."),
    _step("train/skipped_updates", "updates", "sum", "Optimizer updates that were not applied: no advantage, "
          "or a gradient that is not finite."),
    _step("train/nonfinite_updates", "updates", "sum", "Optimizer updates that were not applied because "
          "their gradient was not finite."),
    _step("train/learning_rate", "", "last", "Learning rate of the step, warm-up included."),
    _step("train/critic/loss", "", "mean", "Mean loss of the critic's updates; algorithms with a critic "
          "only, as the next three."),
    _step("train/critic/grad_norm", "", "mean", "Mean norm of the critic's gradient before clipping."),
    _step("train/critic/clip_frac", "share", "mean", "Share of tokens where the clip of the value decided.",
          weight=TOKENS),
    _step("train/critic/explained_variance", "", "mean", "1 - Var(return - value) / Var(return): 1 for a "
          "perfect critic.", weight=TOKENS),
    _step("train/<other>", "", "mean", "A metric that a trainer of your own returns under this prefix."),

    _step("timing_s/wait_for_batch", "s", "sum", "Time that the trainer waited for the step's batch.",
          label="waited"),
    _step("timing_s/update", "s", "sum", "Time of the step in the trainer, without the push.",
          label="update"),
    _step("timing_s/push", "s", "sum", "Time that the trainer waited for pushes of weights."),
    _step("timing_s/push_behind", "s", "sum", "Time of the push that passed behind the next step's first "
          "passes."),
    _both("timing_s/pull", "s", "sum", "Time that instances stood still for pulls, summed over instances."),
    _step("timing_s/reward", "s", "sum", "Time of verifiers, summed over trajectories."),
    _step("time/step_s", "s", "sum", "Time since the last step ended; the base of all shares of time."),
    _step("time/trainer_waiting_s", "s", "sum", "Time in which the trainer did nothing; the sum of the "
          "causes below."),
    _step("time/waiting/rollout_s", "s", "sum", "… of it while instances were at work."),
    _step("time/waiting/longest_s", "s", "sum", "… of it while only the longest responses still ran."),
    _step("time/waiting/reward_s", "s", "sum", "… of it while more trajectories were scored than ran."),
    _step("time/waiting/pull_s", "s", "sum", "… of it while at least half of the instances pulled weights."),
    _step("time/waiting/routing_s", "s", "sum", "… of it while nothing ran, was scored or was loaded."),
    _step("time/waiting/environment_s", "s", "sum", "… of it while most trajectories waited for answers of "
          "their environment."),
    _step("time/instances_s", "s", "sum", "Time that instances were up, summed over instances."),
    _step("time/instances_idle_s", "s", "sum", "Time that instances had no trajectory, summed over "
          "instances."),
    _step("time/instances_idle_training_s", "s", "sum", "… of it while the trainer worked."),
    _both("time/decoding_s", "s", "sum", "Time that instances decoded, summed over instances."),
    _end("wait/trainer_s", "s", "last", "Time that the trainer waited for batches in this attempt."),
    _end("wait/instances_s", "s", "last", "Time that instances had no trajectory in this attempt, summed "
         "over instances."),

    _both("coord/route_count", "commands", "sum", "Routes sent: a trajectory was given to an instance."),
    _both("coord/interrupt_count", "commands", "sum", "Interrupts sent: a trajectory was taken back, its "
          "tokens kept.", title="interrupts", figure="interrupts"),
    _both("coord/abort_count", "commands", "sum", "Aborts sent: a trajectory was dropped."),
    _both("coord/pull_count", "commands", "sum", "Pulls sent: an instance was told to load newer weights.",
          title="pulls", figure="pulls"),
    _both("coord/migrate_count", "commands", "sum", "Interrupts that migration ordered; also in "
          "`coord/interrupt_count`.", title="migrations", figure="migrations"),
    _both("coord/route_seconds", "s", "sum", "Time that instances stood still for Routes."),
    _both("coord/interrupt_seconds", "s", "sum", "Time that instances stood still for Interrupts."),
    _both("coord/abort_seconds", "s", "sum", "Time that instances stood still for Aborts."),
    _both("coord/pull_seconds", "s", "sum", "Time that instances stood still for Pulls."),
    _both("coord/migrate_seconds", "s", "sum", "Share of migration in `coord/interrupt_seconds`."),
    _both("coord/step_seconds", "s", "sum", "CPU time of the coordinator's cycles."),
    _both("coord/handle_seconds", "s", "sum", "CPU time of the coordinator's event handling."),
    _both("coord/seconds", "s", "sum", "CPU time of the coordinator: `step_seconds` and `handle_seconds`."),
    _step("coord/cost_model_error", "share", "last", "Relative error of the cost model's predicted decode "
          "times; from the first measured step on."),
    _end("coord/k1", "s", "last", "Cost model: seconds per cached token and decode step."),
    _end("coord/k2", "s", "last", "Cost model: least seconds of a decode step."),
    _end("coord/k3", "s", "last", "Cost model: seconds per running trajectory and decode step."),
    _end("coord/k4", "s", "last", "Cost model: seconds of any decode step."),
    _end("coord/prefill", "s", "last", "Cost model: seconds per token whose KV is built."),

    _both("tokens/generated", "tokens", "last", "Tokens generated in this attempt; the sum of the other "
          "five."),
    _both("tokens/trained", "tokens", "last", "… of them trained on."),
    _both("tokens/filtered", "tokens", "last", "… of them in groups that were filtered."),
    _both("tokens/aborted", "tokens", "last", "… of them aborted with their trajectories."),
    _both("tokens/discarded", "tokens", "last", "… of them dropped for another reason, such as a failed "
          "group."),
    _both("tokens/in_flight", "tokens", "last", "… of them being generated, scored or waiting for training."),

    _eval("eval/weight_version", "", "last", "The weight version that was evaluated."),
    _eval("eval/<set>/avg@<k>", "score", "last", "Mean raw score of k responses to each prompt.",
          label="accuracy", digits=3),
    _eval("eval/<set>/pass@<k>", "share", "last", "Unbiased estimate of the chance that one of k responses "
          "is right.", label="pass@k", digits=3),
    _eval("eval/<set>/prompts", "prompts", "last", "Prompts of the set."),
    _eval("eval/<set>/response_len_mean", "tokens", "last", "Mean response length."),
    _eval("eval/<set>/truncated_ratio", "share", "last", "Share of responses cut off at the token budget."),
    _eval("eval/seconds", "s", "sum", "Time of the evaluation."),

    _sample("trainer/busy", "", "mean", "1 while the trainer works on a step, else 0."),
    _sample("instance/<i>/version", "", "last", "Weight version that the instance has loaded."),
    _sample("instance/<i>/running", "trajectories", "mean", "Trajectories being decoded.", label="run"),
    _sample("instance/<i>/waiting", "trajectories", "mean", "Trajectories waiting in the instance.",
            label="wait"),
    _sample("instance/<i>/kv_usage", "share", "mean", "Share of the KV cache in use.", label="KV"),
    _sample("instance/<i>/tokens_per_s", "tokens/s", "mean", "Generated tokens per second since the last "
            "sample.", label="tok/s"),
    _sample("instance/<i>/preemptions", "preemptions", "last", "Preemptions of the instance in this "
            "attempt."),
    _end("simulation/wall_s", "s", "last", "Real time that the simulation took; simulated runs only."),
    _end("simulation/speed", "", "last", "Simulated seconds per real second; simulated runs only."),
)  # fmt: skip

CATALOGUE: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE}
"""All metrics and families, by name."""
FOREIGN = CATALOGUE["train/<other>"]
"""Where a metric of a trainer that is plugged in belongs."""
_FAMILIES = [(m.pattern, m) for m in _TABLE if m.is_family and m is not FOREIGN]


class UnknownMetric(UserWarning):
    """A row has a metric that is not in the catalogue."""


@lru_cache(maxsize=4096)
def find(name: str) -> Metric | None:
    """The catalogue's line about a metric; None where there is none."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    family = next((metric for pattern, metric in _FAMILIES if pattern.fullmatch(name)), None)
    return FOREIGN if family is None and FOREIGN.pattern.fullmatch(name) else family


def check_names(row: Row) -> None:
    """Warn (UnknownMetric, once a name) of metrics that are not in the catalogue for this kind of row."""
    for name in row.values:
        metric = find(name)
        if metric is None or row.kind not in metric.kinds:
            warnings.warn(
                f"rows of kind {row.kind} have no metric {name!r} in staleflow/telemetry/catalogue.py; it is "
                "recorded, without unit and meaning. Add it there, or, where a trainer of your own returns "
                f"it, let its name begin with {FOREIGN.section}/",
                UnknownMetric,
                stacklevel=2,
            )


def summarize(name: str, rows: Iterable[Mapping[str, Any]]) -> float | None:
    """What a metric comes to over rows of one kind, as its line in the catalogue says.

    Rows without a number for it do not count; None where none has one, or it is not to be summed up. Raises
    KeyError for a metric that is not in the catalogue.
    """
    metric = find(name)
    if metric is None:
        raise KeyError(name)
    there = [row for row in rows if isinstance(row.get(name), int | float)]
    values = [float(row[name]) for row in there]
    if not values:
        return None
    match metric.over_steps:
        case "sum":
            return sum(values)
        case "mean":
            return _mean(values, [_weight(metric.weight, row) for row in there])
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]
        case "none":
            return None


def _weight(name: str, row: Mapping[str, Any]) -> float:
    """The row's weight: a metric, or the sum of a family; 0 where the row has none."""
    if not name:
        return 1.0
    family = CATALOGUE[name]
    return sum(float(value) for key, value in row.items() if key == name or find(key) is family)


def _mean(values: list[float], weights: list[float]) -> float:
    """The weighted mean; the plain one where no row has a weight."""
    if not any(weights):
        weights = [1.0] * len(values)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
