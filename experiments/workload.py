"""The workload and the systems of the simulated studies, as data, with the reason for each constant.

From the paper's set-up (arXiv 2601.12784): models, H20 GPUs, prompts of 2K and responses of up to 20K tokens,
128 prompts x 16, η = 1 to 3, no redundancy, GPUs divided anew for each system. How long its responses were is
not known to us; that is chosen here, and varied by the studies.
"""

from __future__ import annotations

from staleflow.experiments.cells import System

SYNC = System(name="sync", policy="sync")
DIVIDED = System(name="sync, divided", policy="strict", bound=0)
ONE_STEP = System(name="one_step", policy="one_step")
STRICT = System(name="strict", policy="strict")
QUEUE = System(name="strict_queue", policy="strict_queue")
STALEFLOW = System(name="staleflow", policy="staleflow")
SYSTEMS = (SYNC, DIVIDED, ONE_STEP, STRICT, QUEUE, STALEFLOW)

SYSTEM_NOTE = (
    "`sync` has all GPUs for both phases, waits for nothing but the phase, and pays 5 s for each change of "
    "phase (weights resharded, KV cache released and made anew). `sync, divided` is synchronous training on "
    "divided GPUs, as systems without colocation do it: policy `strict` with η = 0. `strict` sends whole "
    "groups to the least loaded instance at once; `strict_queue` has one central queue and a tuned cap. Both "
    "admit what AReaL's rule admits. All run in the same simulator, under the same protocol and costs."
)

MOST = 20_480
MEDIAN, SIGMA, CORRELATION, TRUNCATED = MOST // 4, 0.8, 0.5, 0.02
LENGTH_NOTE = (
    f"Responses are lognormal with median {MEDIAN:,} and a deviation of {SIGMA} of the logarithm, cut at "
    f"{MOST:,} tokens: a mean of about 7,000, and in each batch a longest one that is three times that. Half "
    f"of the variance is common to a group, for hard prompts get long answers; {TRUNCATED:.0%} never end by "
    "themselves, so that with those of the tail about 6 % are cut, a spike as runs with a limit on length "
    "have it. The lengths in the paper's runs are not known to us; these are our choice, and the study "
    "`scaling` varies them."
)
HARDWARE_NOTE = (
    "Times come from a roofline with ordinary shares of the peak (docs/hardware.md): memory 80 %, decoding "
    "60 % of the FLOPs, training 40 %, one log-prob pass before each update. None of it was fitted to a "
    "result. Coordination has a cycle at most every 0.25 s here, and instances report lengths every 30 s."
)


def workload(
    *,
    batch: int = 128,
    prompt: int = 2048,
    most: int = MOST,
    median: float | None = None,
    sigma: float = SIGMA,
) -> tuple[str, ...]:
    """Overrides of the workload; `median` None: a quarter of `most`."""
    return (
        f"data.batch_size={batch}",
        "data.group_size=16",
        f"rollout.max_new_tokens={most}",
        "rollout.max_running=256",
        f"simulation.prompt_tokens={prompt}",
        "simulation.lengths.kind=lognormal",
        f"simulation.lengths.median={median or most // 4}",
        f"simulation.lengths.sigma={sigma}",
        f"simulation.lengths.correlation={CORRELATION}",
        f"simulation.lengths.truncated={TRUNCATED}",
        "coordination.interval_ms=250",
    )


def machine(model: str, gpu: str = "H20") -> tuple[str, ...]:
    """Overrides of model and GPU."""
    return (f"simulation.model={model}", f"simulation.gpu={gpu}")
