"""Costs of decoding, prefill, training and transfers, from a model, a GPU and shares of its peak.

A rollout instance has t GPUs (tensor parallel). With B = t * memory bandwidth * its share and C = t * FLOPs
* the share for decoding, one decode step of n trajectories with kv cached tokens takes

    k1 * kv + max(k2, k3 * n) + k4        seconds, with

    k1 = max(KV bytes of a token * copies / B, attention FLOPs of a position / C)
    k2 = bytes of the weights that a step reads / B
    k3 = 2 FLOPs * active parameters / C + all-reduced bytes of a token / link
    k4 = step overhead + 2 * layers * all-reduce latency, the latter where t > 1

- copies: with fewer KV heads than GPUs, t / kv_heads GPUs keep each head;
- bytes of the weights: for a dense model, all but the input embedding. For a mixture of experts, those plus
  the share of the experts that the step's tokens choose, 1 - (1 - k/E)^n, *averaged over n from 1 to
  `running`*, the load that fits an instance, because the cost model has one floor for all n. So the floor is
  right on average for an instance that empties trajectory by trajectory, too high for its last few and some
  percent too low at full load;
- all-reduced bytes: two all-reduces per layer of `hidden` numbers of 2 bytes, of which a ring sends
  2 (t - 1) / t.

Prefill computes no logits: per token (2 * active parameters without the output layer + attention FLOPs
* positions attended) / (t * FLOPs * the share for prefill) + the same all-reduced bytes.

Training on g GPUs: per token of prompts and responses (3 + log-prob passes) * (2 * active parameters +
attention FLOPs * positions attended) / (g * FLOPs * the share for training); a backward pass costs as much as
two forward passes (the well-known 6 * parameters). Per optimizer update: 30 bytes of memory traffic per
parameter (Adam's state: 16 bytes read, 14 written), spread over g GPUs, and 4 bytes per parameter through
each GPU's network (gradients reduced, weights gathered, as in ZeRO, without overlap).

A push sends each training GPU's shard of the weights through its network; a pull loads all weights through
the networks of the t GPUs of an instance. The parameter server is assumed to be sharded well enough that
concurrent pulls do not slow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from staleflow.coordination.cost_model import CostModel
from staleflow.errors import UserError
from staleflow.simulation.gpus import NODE_GPUS, Gpu
from staleflow.simulation.models import NUMBER_BYTES, ModelDescription
from staleflow.simulation.settings import TrainerCosts

STATE_BYTES = 16
"""Bytes per trained parameter: weight and gradient in bfloat16; master weight and two moments in float32."""
UPDATE_BYTES = 30
"""Bytes of memory traffic per parameter of one Adam update: all state read, all but the gradient written."""
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Achieved shares of the hardware's peak; see the config's section `simulation.efficiency`."""

    memory_bandwidth: float = 0.8
    decode_compute: float = 0.6
    prefill_compute: float = 0.5
    training_compute: float = 0.4
    kv_memory: float = 0.9
    training_memory: float = 0.8
    network: float = 0.8
    step_overhead_s: float = 0.002
    all_reduce_s: float = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on GPUs of one kind."""

    model: ModelDescription
    gpu: Gpu
    shares: Shares = Shares()

    # ------------------------------------------------------------------ a rollout instance of `parallel` GPUs

    def kv_capacity(self, parallel: int) -> int:
        """Tokens of KV that fit into memory beside the weights.

        floor((t * memory * share - bytes of the weights) / (KV bytes of a token * copies)); may be below 0.
        Raises UserError if the model cannot be split over that many GPUs.
        """
        self._check_parallel(parallel)
        free = parallel * self.gpu.memory * self.shares.kv_memory - self.model.weight_bytes
        return int(free // (self.model.kv_bytes * self._copies(parallel)))

    def memory_sum(self, parallel: int) -> str:
        """The arithmetic of `kv_capacity`, for a message."""
        memory, share = self.gpu.memory / GB, self.shares.kv_memory
        weights = self.model.weight_bytes / GB
        free = parallel * memory * share - weights
        per_token = self.model.kv_bytes * self._copies(parallel)
        return (
            f"{parallel} x {memory:g} GB ({self.gpu.name}) x {share:g} (kv_memory) - {weights:.1f} GB "
            f"(weights of {self.model.name}) = {free:.1f} GB, at {per_token / 1e3:.1f} kB a token "
            f"{max(0, self.kv_capacity(parallel)):,} tokens"
        )

    def costs(self, parallel: int, *, running: int, attended: float, pull_s: float = 0.0) -> CostModel:
        """The cost model of an instance.

        `running`: trajectories that fit it; the floor of a mixture is averaged over loads up to this.
        `attended`: mean positions that a token attends to when its KV is rebuilt. `pull_s`: seconds of a pull
        in addition to its transfer.
        """
        self._check_parallel(parallel)
        model, shares = self.model, self.shares
        bandwidth = parallel * self.gpu.memory_bandwidth * shares.memory_bandwidth
        compute = parallel * self.gpu.flops * shares.decode_compute
        prefill_compute = parallel * self.gpu.flops * shares.prefill_compute
        body = model.active_parameters - model.vocab * model.hidden
        rounds = 2 * model.layers if parallel > 1 else 0
        reduced = rounds * model.hidden * NUMBER_BYTES * 2 * (parallel - 1) / parallel
        reduced_s = reduced / (self.gpu.link * shares.network)
        return CostModel(
            k1=max(model.kv_bytes * self._copies(parallel) / bandwidth, model.attention_flops / compute),
            k2=self.bytes_read(running) / bandwidth,
            k3=2 * model.active_parameters / compute + reduced_s,
            k4=shares.step_overhead_s + rounds * shares.all_reduce_s,
            prefill=(2 * body + model.attention_flops * attended) / prefill_compute + reduced_s,
            pull=pull_s + model.weight_bytes / (parallel * self.gpu.network * shares.network),
        )

    def bytes_read(self, running: int) -> float:
        """Bytes of weights that a decode step reads, averaged over loads from 1 to `running`."""
        loads = range(1, max(1, running) + 1)
        experts = sum(self.model.experts_read(n) for n in loads) / len(loads)
        return (self.model.shared_parameters + self.model.expert_parameters * experts) * NUMBER_BYTES

    def _copies(self, parallel: int) -> float:
        return max(1.0, parallel / self.model.kv_heads)

    def _check_parallel(self, parallel: int) -> None:
        heads, kv_heads = self.model.heads, self.model.kv_heads
        if parallel > NODE_GPUS or heads % parallel or (kv_heads % parallel and parallel % kv_heads):
            raise UserError(
                f"simulation.tensor_parallel is {parallel}, but {self.model.name} has {heads} heads and "
                f"{kv_heads} KV heads, and a node {NODE_GPUS} GPUs: use {_words(self.parallels())}"
            )

    def parallels(self) -> tuple[int, ...]:
        """Possible numbers of GPUs of one instance, whether or not the model fits their memory."""
        heads, kv_heads = self.model.heads, self.model.kv_heads
        return tuple(
            t
            for t in range(1, NODE_GPUS + 1)
            if NODE_GPUS % t == 0 and heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
        )

    # ------------------------------------------------------------------ training on `gpus` GPUs

    def least_training_gpus(self) -> int:
        """Minimum of GPUs whose memory holds weights, gradients and optimizer: ceil(16 bytes per parameter /
        usable bytes of one GPU)."""
        state = self.model.parameters * STATE_BYTES
        return int(-(-state // (self.gpu.memory * self.shares.training_memory)))

    def training_sum(self) -> str:
        """The arithmetic of `least_training_gpus`, for a message."""
        state = self.model.parameters * STATE_BYTES / GB
        return (
            f"weights, gradients and optimizer: {self.model.parameters / GB:.1f} billion parameters x "
            f"{STATE_BYTES} bytes = {state:.0f} GB on GPUs of {self.gpu.memory / GB:g} GB x "
            f"{self.shares.training_memory:g} (training_memory)"
        )

    def check_training(self, gpus: int) -> None:
        """Raise UserError if the model does not fit into `gpus` GPUs."""
        if gpus < self.least_training_gpus():
            raise UserError(
                f"{self.model.name} cannot be trained on {gpus} {self.gpu.name} ({self.training_sum()}): "
                f"simulation.training_gpus must be at least {self.least_training_gpus()}"
            )

    def trainer_costs(
        self,
        gpus: int,
        *,
        attended: float,
        updates: int = 1,
        logprob_passes: int = 0,
        overhead_s: float = 0.0,
        push_s: float = 0.0,
    ) -> TrainerCosts:
        """Time of a training step.

        `attended`: mean positions that a trained token attends to; `updates`: optimizer updates per step;
        `overhead_s`, `push_s`: seconds of a step and of a push in addition to those computed here. Raises
        UserError if the model does not fit.
        """
        self.check_training(gpus)
        model, gpu, shares = self.model, self.gpu, self.shares
        forward = 2 * model.active_parameters + model.attention_flops * attended
        network = gpu.network * shares.network
        update_s = UPDATE_BYTES * model.parameters / (gpus * gpu.memory_bandwidth * shares.memory_bandwidth)
        if gpus > 1:
            update_s += 2 * model.weight_bytes / network
        return TrainerCosts(
            fixed_s=overhead_s + updates * update_s,
            token_s=(3 + logprob_passes) * forward / (gpus * gpu.flops * shares.training_compute),
            push_s=push_s + model.weight_bytes / (gpus * network),
        )


def _words(numbers: tuple[int, ...]) -> str:
    return " or ".join(str(number) for number in numbers)
