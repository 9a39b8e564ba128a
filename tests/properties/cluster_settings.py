"""The settings of one random cluster: everything that a seed draws before the run begins.

Rates and times are chosen so that a run of five steps takes some hundred events: steps of 10 to 200 virtual
milliseconds, responses of a few tokens with a long tail, messages that take up to as long as a step or two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from staleflow.coordination.cost_model import CostModel
from staleflow.coordination.migration import MigrationSettings
from staleflow.coordination.policies import POLICIES, PolicySettings, effective_bound
from staleflow.coordination.stragglers import StragglerRule
from staleflow.protocol.records import LastBatch
from staleflow.rollout.engine import OnPull


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """One instance."""

    kv_capacity: int
    max_running: int
    costs: CostModel
    """What its steps, prefills and pulls take, in virtual seconds."""
    on_pull: OnPull = "recompute"


FAST = CostModel(k1=5e-5, k2=0.01, k3=0.002, k4=0.002, prefill=2e-4, pull=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """One run. The defaults are a calm one."""

    seed: int
    policy: str = "staleflow"
    strategies: PolicySettings = field(default_factory=PolicySettings)
    bound: int = 1
    batch_size: int = 2
    group_size: int = 2
    surplus: int = 0
    spare_groups: int = 0
    stragglers: StragglerRule = field(default_factory=StragglerRule)
    is_filtered: bool = False
    equal_rewards: float = 0.0
    """Chance of the reward that most others have."""
    steps: int = 5
    prompts: int | None = None
    """How many the source has; None: no end."""
    last_batch: LastBatch = "train"
    stop_at: float | None = None
    """When the run is asked to stop."""
    instances: tuple[InstanceSettings, ...] = (InstanceSettings(kv_capacity=80, max_running=4, costs=FAST),)
    known_costs: CostModel | None = FAST
    """The cost model that coordination starts with; None: the package's own start values."""
    refine_costs: bool = True
    prompt_lengths: tuple[int, ...] = (4,)
    """Of prompts in their order, round and round."""
    median_response: float = 5.0
    spread: float = 1.0
    """Deviation of a response's length in log space."""
    max_new_tokens: int = 32
    turns: int = 1
    slow_tool: float = 0.0
    """Seconds for which the environment says `Waiting` between two turns; 0: it never does."""
    delay: float = 0.0
    """Most seconds that a message is under way."""
    cycle_delay: float = 0.005
    """Most seconds from a message to the moment at which the loop looks at it, with what came meanwhile."""
    progress_interval_s: float = 0.1
    train_s: float = 0.3
    score_s: float = 0.0
    deaths: float = 0.0
    """Chance that an instance dies in a step."""
    restart_s: float = 1.0
    refusals: float = 0.0
    """Chance that a pull is refused."""
    outage: tuple[int, float, float] | None = None
    """(instance, from, to): it can pull nothing in this time."""
    losses: float = 0.0
    """Chance that an engine forgets a trajectory that it was sent, and one that it has finished."""
    always_lost: str = ""
    """Id of a trajectory that every engine forgets."""
    stall_after_s: float = 8.0
    repeats: float = 0.0
    """Chance that commands arrive twice."""
    tool_failures: float = 0.0
    """Chance that an environment fails, and that it never answers."""
    push_s: float = 0.0
    """Mean seconds from a trained step to its weights in the parameter server."""
    interval_s: float = 0.0
    """Least time between two cycles that are not urgent."""
    checkpoint_every: int | None = None
    save_s: float = 0.3
    """Most seconds that a checkpoint takes."""
    evaluate_every: int = 0
    evaluation_s: float = 0.5
    """Most seconds that an evaluation takes."""

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that there may be."""
        return max(self.prompt_lengths) + self.max_new_tokens

    @property
    def kept_bound(self) -> int:
        """The staleness bound that the policy promises."""
        return effective_bound(self.policy, self.bound)


def draw_settings(seed: int) -> ClusterSettings:
    """The settings of a seed."""
    rng = random.Random(f"cluster-{seed}")
    policy = POLICIES[seed % len(POLICIES)] if seed % 2 else "staleflow"
    bound = rng.choice((0, 1, 1, 2, 3))
    if policy == "one_step":
        bound = max(1, bound)
    settings = ClusterSettings(
        seed=seed,
        policy=policy,
        bound=bound,
        batch_size=rng.randint(1, 3),
        group_size=rng.choice((1, 2, 2, 3, 5)),
        steps=rng.randint(3, 5),
        prompt_lengths=_prompt_lengths(rng),
        median_response=rng.choice((2.0, 4.0, 8.0)),
        spread=rng.choice((0.0, 0.8, 1.5)),
        max_new_tokens=rng.choice((8, 8, 24, 24, 48)),
        turns=rng.choice((1, 1, 1, 2)),
        slow_tool=rng.choice((0.0, 0.0, 0.5)),
        delay=rng.choice((0.0, 0.01, 0.05, 0.3)),
        cycle_delay=rng.choice((0.001, 0.01, 0.05)),
        progress_interval_s=rng.choice((0.05, 0.2, 1.0)),
        train_s=rng.choice((0.05, 0.3, 2.0)),
        score_s=rng.choice((0.0, 0.05, 0.5)),
        refine_costs=rng.random() < 0.2,
    )
    on_pull: OnPull = rng.choice(("recompute", "keep_kv"))
    settings = replace(settings, instances=_instances(rng, settings.longest, on_pull))
    settings = replace(settings, known_costs=rng.choice((None, settings.instances[0].costs)))
    settings = replace(settings, strategies=_strategies(rng, policy, settings.instances))
    if policy == "staleflow" and rng.random() < 0.3:
        settings = _crowded(rng, settings)
    settings = _redundancy(rng, settings)
    if rng.random() < 0.4:  # a source that ends, and no limit of steps before that
        settings = replace(
            settings, prompts=rng.randint(1, 10), last_batch=rng.choice(("train", "drop", "pad")), steps=99
        )
    if rng.random() < 0.5:
        settings = _trouble(rng, settings)
    return _beside(rng, settings)


def _prompt_lengths(rng: random.Random) -> tuple[int, ...]:
    return rng.choice(((4,), (2, 9, 5), (3, 3, 3, 30)))


def _instances(rng: random.Random, longest: int, on_pull: OnPull) -> tuple[InstanceSettings, ...]:
    costs = CostModel(
        k1=rng.choice((0.0, 5e-5, 1e-3)),
        k2=rng.choice((0.0, 0.01, 0.03)),
        k3=rng.choice((0.0, 0.002, 0.01)),
        k4=rng.choice((0.002, 0.01)),
        prefill=rng.choice((0.0, 2e-4, 5e-3)),
        pull=rng.choice((0.0, 0.02, 0.5)),
    )
    even = rng.random() < 0.5
    capacity, running = round(longest * rng.uniform(1.0, 4.0)), rng.choice((1, 2, 4, 16))
    instances = []
    for _ in range(rng.randint(1, 6)):
        if not even:
            capacity, running = round(longest * rng.uniform(1.0, 4.0)), rng.choice((1, 2, 4, 16))
        slowness = 1.0 if even else rng.choice((1.0, 1.0, 2.0, 5.0))
        slowed = replace(
            costs,
            k1=costs.k1 * slowness,
            k2=costs.k2 * slowness,
            k3=costs.k3 * slowness,
            k4=costs.k4 * slowness,
        )
        instances.append(
            InstanceSettings(kv_capacity=capacity, max_running=running, costs=slowed, on_pull=on_pull)
        )
    return tuple(instances)


def _strategies(rng: random.Random, policy: str, instances: tuple[InstanceSettings, ...]) -> PolicySettings:
    own = policy == "staleflow"
    headroom = rng.choice((0.0, 0.1, 0.3))
    return PolicySettings(
        routing=rng.choice((None, None, "naive")) if own else None,
        synchronization=rng.choice((None, None, "naive")) if own else None,
        migration=rng.choice((None, None, "naive")) if own else None,
        mu=rng.choice((0.0, 0.3, 0.9)),
        kv_headroom=headroom,
        max_per_instance=rng.choice((1, 2, 8)),
        moves=MigrationSettings(
            phi_wait=rng.choice((0, 0, 1, 3)),
            psi_throughput=rng.choice((1.0, 1.0, 1.5, 5.0)),
            rest_s=rng.choice((0.0, 0.2, 2.0)),
            kv_headroom=headroom,
        ),
        recompute=instances[0].on_pull == "recompute",
    )


def _crowded(rng: random.Random, settings: ClusterSettings) -> ClusterSettings:
    """Much to run, attention that makes crowds slow, tight caches, and nothing that keeps from moving."""
    settings = replace(
        settings, median_response=16.0, spread=1.5, max_new_tokens=48, group_size=rng.randint(4, 8)
    )
    costs = CostModel(k1=1e-3, k2=0.005, k3=0.0, k4=0.002, prefill=rng.choice((0.0, 1e-4)), pull=0.02)
    instances = tuple(
        InstanceSettings(
            kv_capacity=round(settings.longest * rng.uniform(1.0, 3.0)), max_running=16, costs=costs
        )
        for _ in range(rng.randint(2, 4))
    )
    moves = replace(settings.strategies.moves, psi_throughput=1.0, rest_s=rng.choice((0.0, 0.2)))
    strategies = replace(settings.strategies, migration=None, moves=moves, mu=0.0, recompute=True)
    return replace(settings, instances=instances, strategies=strategies, known_costs=costs)


def _redundancy(rng: random.Random, settings: ClusterSettings) -> ClusterSettings:
    takes_spares = settings.policy == "staleflow" and settings.strategies.routing != "naive"
    return replace(
        settings,
        surplus=rng.choice((0, 0, 0, 1, 2)),
        spare_groups=rng.choice((0, 0, 1, 3)) if takes_spares else 0,
        stragglers=StragglerRule(
            action=rng.choice(("wait", "wait", "retry", "truncate")), at_most=rng.choice((1, 4))
        ),
        is_filtered=rng.random() < 0.3,
        equal_rewards=rng.choice((0.0, 0.4)),
    )


def _trouble(rng: random.Random, settings: ClusterSettings) -> ClusterSettings:
    kinds = rng.sample(("deaths", "refusals", "outage", "losses", "stop"), k=rng.randint(1, 3))
    if "outage" in kinds:
        begin = rng.uniform(0.0, 1.0)
        outage = (rng.randrange(len(settings.instances)), begin, begin + rng.choice((0.5, 5.0)))
        settings = replace(settings, outage=outage)
    return replace(
        settings,
        deaths=0.02 if "deaths" in kinds else 0.0,
        refusals=0.3 if "refusals" in kinds else 0.0,
        losses=0.02 if "losses" in kinds else 0.0,
        stop_at=rng.uniform(0.0, 3.0) if "stop" in kinds else None,
        restart_s=rng.choice((0.1, 1.0)),
        delay=max(settings.delay, 0.02),  # else a refused pull would be tried a thousand times a second
    )


def _beside(rng: random.Random, settings: ClusterSettings) -> ClusterSettings:
    """What happens beside rollout: pushes, checkpoints, evaluations and environments that fail."""
    return replace(
        settings,
        push_s=rng.choice((0.0, 0.05, 0.5)),
        interval_s=rng.choice((0.0, 0.0, 0.02, 0.1)),
        repeats=rng.choice((0.0, 0.0, 0.1)),
        tool_failures=rng.choice((0.0, 0.0, 0.05)),
        checkpoint_every=rng.choice((None, 0, 1, 2)),
        evaluate_every=rng.choice((0, 0, 1, 2)),
        evaluation_s=rng.choice((0.1, 3.0)),
    )
