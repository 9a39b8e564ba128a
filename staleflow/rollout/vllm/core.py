"""vLLM's engine core, driven step by step. The only module that imports vLLM; it runs in the host process.

Invariants:

- vLLM decodes only in `step` and at the end of `update`. Between two calls it is idle, so no step is under
  way during an update, and the weight version of each token is known exactly;
- `recompute` drops all KV and cached prefixes and rebuilds those of the running trajectories; `keep_kv` keeps
  the KV of the running ones;
- the prefix cache never returns KV of other weights: its keys are salted with the weight version, and waiting
  trajectories get the new version's salt.

This is the core of vLLM's AsyncLLM and LLM without their front ends, which would add an event loop, a text
decoder and another process between vLLM and an engine that exchanges token ids step by step.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from staleflow.errors import ConfigError, EngineError, TransportError
from staleflow.rollout.engine import OnPull
from staleflow.rollout.vllm.heads import widened_config, widening
from staleflow.rollout.vllm.messages import Add, EngineSetup, Gain, Stepped, WeightsAt

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU: the smallest that its kernels support well; each trajectory wastes half a
block on average."""
CPU_BATCH_TOKENS = (2048, 16384)
"""Bounds on the tokens of one pass on a CPU: the KV capacity, to prefill all at once, is clipped to these."""


class Core:
    """The engine core for `setup`. Raises ConfigError for settings that vLLM refuses."""

    def __init__(self, setup: EngineSetup, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called, in a thread, when a worker process dies."""
        self._setup = setup
        self._cpu = bool(current_platform.is_cpu())
        about = json.loads((Path(setup.model) / "config.json").read_text(encoding="utf-8"))
        self._tied = bool(about.get("tie_word_embeddings", False))
        self._widen = widening(about, _cpu_head_widths()) if self._cpu else None
        with tempfile.TemporaryDirectory(prefix="staleflow-vllm-") as folder:
            model = setup.model
            if self._widen is not None:
                model = folder
                text = json.dumps(widened_config(about, self._widen))
                (Path(folder) / "config.json").write_text(text, encoding="utf-8")
            try:
                config: VllmConfig = EngineArgs(**self._arguments(model)).create_engine_config()
            except (TypeError, ValueError, NotImplementedError) as error:
                reason = " ".join(str(error).split())[:500]
                raise ConfigError(f"vLLM refuses the settings of the engine: {reason}") from error
            self._core: Any = EngineCore(
                config, Executor.get_class(config), log_stats=False, executor_fail_callback=on_failure
            )
        self._scheduler: Any = self._core.scheduler
        self._version = -1
        self._rebuilding = False
        self.max_model_len = int(config.model_config.max_model_len)
        blocks, block = config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size
        whole = config.cache_config.kv_cache_size_tokens or blocks * block
        # On a CPU there are spare blocks, because blocks may be partly filled.
        self.kv_capacity = min(whole, setup.kv_capacity_tokens) if self._cpu else int(whole)

    def _arguments(self, model: str) -> dict[str, Any]:
        """Arguments of EngineArgs."""
        setup = self._setup
        eager = self._cpu if setup.enforce_eager is None else setup.enforce_eager
        arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "load_format": "dummy",
            "dtype": setup.dtype,
            "max_model_len": setup.max_model_len,
            "max_num_seqs": setup.max_running,
            "seed": 0,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": setup.tensor_parallel,
            "distributed_executor_backend": "uni" if setup.tensor_parallel == 1 else "mp",
            "enforce_eager": eager,
            "enable_prefix_caching": setup.prefix_caching,
            "worker_extension_cls": "staleflow.rollout.vllm.worker.WeightLoading",
            "disable_log_stats": True,
        }
        if self._cpu:
            capacity, (least, most) = setup.kv_capacity_tokens, CPU_BATCH_TOKENS
            arguments |= {
                "max_model_len": min(setup.max_model_len, capacity),
                "block_size": CPU_BLOCK_TOKENS,
                "num_gpu_blocks_override": -(-capacity // CPU_BLOCK_TOKENS) + setup.max_running + 1,
                "kv_cache_memory_bytes": 1 << 26,  # skips measuring memory: the number of blocks decides
                "max_num_batched_tokens": max(least, min(most, capacity)),
            }
            if eager:
                # Otherwise the first step compiles a sampling kernel, which takes longer than a short run.
                os.environ["TORCHDYNAMO_DISABLE"] = "1"
                import torch._dynamo.config

                torch._dynamo.config.disable = True
        else:
            arguments["gpu_memory_utilization"] = setup.gpu_memory_utilization
        return arguments | setup.options

    # ------------------------------------------------------------------ trajectories

    def add(self, item: Add) -> None:
        """Queue a trajectory."""
        sampling = item.sampling
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=item.seed,
            max_tokens=item.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop_token_ids alone end a response
            detokenize=False,
            logprobs=0,  # of the sampled token only
        )
        request = EngineCoreRequest(
            request_id=str(item.number),
            prompt_token_ids=item.tokens,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=self._salt,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def remove(self, numbers: tuple[int, ...]) -> None:
        """Forget trajectories."""
        self._core.abort_requests([str(number) for number in numbers])

    def step(self) -> Stepped:
        """One step of all running trajectories; waiting ones join while there is room."""
        began = time.perf_counter()
        before = {request.request_id for request in self._scheduler.running}
        outputs: list[EngineCoreOutput] = []
        while self._core.batch_queue or self._scheduler.has_requests():
            result, executed = self._core.step_fn()
            self._core.post_step(executed)
            if result is not None:  # None: asynchronous scheduling only filled its batch queue
                outputs = [output for each in result.values() for output in each.outputs]
                break
        after = {request.request_id for request in self._scheduler.running}
        gone = before - after
        return Stepped(
            version=self._version,
            gains=[_gain(output) for output in outputs],
            preempted=[int(name) for name in gone if name in self._scheduler.requests],
            seconds=time.perf_counter() - began,
            rebuilding=self._rebuilding,
        )

    # ------------------------------------------------------------------ weights

    def update(self, weights: WeightsAt, on_pull: OnPull) -> Iterator[Stepped]:
        """Swap weights; yields the steps that finish before the swap, and those that rebuild KV.

        Raises TransportError, changing nothing, if the weights are not available. After any other error the
        engine is unusable.
        """
        yield from self._finish_steps()
        answers: list[str] = self._core.collective_rpc("staleflow_lease", args=(weights,))
        reasons = [answer for answer in answers if answer]
        if reasons:
            self._core.collective_rpc("staleflow_release")
            self._scheduler.set_pause_state(PauseState.UNPAUSED)
            raise TransportError(reasons[0])
        self._core.collective_rpc("staleflow_load", args=(self._widen, self._tied))
        self._version = weights.version
        running = [request.request_id for request in self._scheduler.running]
        if on_pull == "recompute" and not self._scheduler.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not drop the KV of the old weights")
        self._salt_waiting()
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        if on_pull == "recompute" and running:
            yield from self._rebuild(running)

    def _finish_steps(self) -> Iterator[Stepped]:
        """Pause the scheduler and finish the steps that asynchronous scheduling has under way."""
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self._rebuilding = True
        while self._core.batch_queue:
            yield self.step()
        self._rebuilding = False

    def _rebuild(self, running: list[str]) -> Iterator[Stepped]:
        """Step until the trajectories in `running` run again, or no more of them fit."""
        left, self._rebuilding = set(running), True
        yield Stepped(version=self._version, gains=[], preempted=[int(r) for r in running], rebuilding=True)
        while left:
            stepped = self.step()
            gained = {str(gain.number) for gain in stepped.gains}
            yield stepped
            settled = gained >= {request.request_id for request in self._scheduler.running}
            left = set() if settled else left - gained
        self._rebuilding = False

    def _salt_waiting(self) -> None:
        """Waiting trajectories will be prefilled under the new weights: let them share its prefixes."""
        if self._setup.prefix_caching:
            for request in self._scheduler.waiting:
                request.cache_salt = self._salt
                request.block_hashes.clear()
                request.update_block_hashes()

    @property
    def _salt(self) -> str:
        return str(self._version)

    def close(self) -> None:
        """Free everything."""
        self._core.shutdown()


def _gain(output: EngineCoreOutput) -> Gain:
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise EngineError(f"vLLM gave up trajectory {output.request_id}: {output.finish_reason}")
    ended: Literal["", "stop", "length"] = ""
    if output.finish_reason is not None:
        ended = "stop" if output.finish_reason == FinishReason.STOP else "length"
    log_probs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
    joined = output.prefill_stats
    return Gain(
        number=int(output.request_id),
        tokens=output.new_token_ids,
        log_probs=log_probs,
        cached=0 if joined is None else joined.num_cached_tokens,
        ended=ended,
    )


def _cpu_head_widths() -> list[int]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widths: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return widths
