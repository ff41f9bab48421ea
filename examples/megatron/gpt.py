# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT of Megatron on its own schedules, and returns losses, norms, weights and times."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import context
import torch
import torch.distributed as dist

from bps_rdma.megatron import register_in_order_of_use


@dataclass(frozen=True)
class Setup:
    """One configuration: the sizes of the model and of parallel groups, and the options in use."""

    hidden: int = 32
    layers: int = 4
    heads: int = 4
    words: int = 96
    length: int = 16
    samples: int = 2  # of a microbatch
    bucket: int = 20_000  # elements
    tp: int = 1
    pp: int = 1
    vpp: int = 0
    batched: bool = False  # messages between pipeline stages
    cp: int = 1
    ep: int = 1
    sp: bool = False
    overlap: bool = False
    average: bool = False
    distributed_optimizer: bool = False
    overlap_gather: bool = False
    in_order: bool = True  # overlapped gathers follow the order of use; the same in all runs of a training
    instances: int = 1
    bf16: bool = False
    fp16: bool = False  # with a loss scale that begins too large
    fp32_gradients: bool = False
    check_nan: bool = False
    per_token: bool = False
    experts: int = 0
    recompute: bool = False  # activations of every layer
    shared_embeddings: bool = True  # between input and output
    microbatches: int = 2
    steps: int = 20


@dataclass
class Trained:
    """The result of a training. Two trainings are equal if these are equal."""

    losses: list[float]
    norms: list[float]
    weights: str
    scale: float  # of the loss, in the end
    bucket_groups: int  # with more than one rank
    seconds: list[float] = field(compare=False)  # of each step on this rank


def train(setup: Setup) -> Trained:
    """Take `setup.steps` steps. Every rank of the torch.distributed default group calls this."""
    training = Training(setup)
    for _ in range(setup.steps):
        training.step()
    trained = training.result()
    training.close()
    return trained


class Training:
    """A model with its optimizer.

    Several trainings can exist in one process, each with its own parallel groups; activate() switches between them.
    Every rank of the torch.distributed default group makes the same calls.

    Attributes:
        losses: of the steps, on the last pipeline stage; empty on the others.
        norms: of the steps' gradients.
        seconds: of the steps, on this rank.
        steps: number of steps, including those before a checkpoint.
    """

    def __init__(self, setup: Setup, prepare: Callable[[torch.nn.Module], None] | None = None) -> None:
        """`prepare` may change each chunk of the model before it is wrapped."""
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parallel_state.destroy_model_parallel()  # of another training, which keeps its references
        parallel_state.initialize_model_parallel(
            setup.tp, setup.pp, virtual_pipeline_model_parallel_size=setup.vpp or None,
            context_parallel_size=setup.cp, expert_model_parallel_size=setup.ep,
            num_distributed_optimizer_instances=setup.instances,
        )  # fmt: skip
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        self.setup = setup
        self.config = _config(setup)
        chunks = _chunks(setup, self.config)
        for chunk in chunks:
            if setup.overlap_gather and setup.in_order:
                register_in_order_of_use(chunk)
            if prepare:
                prepare(chunk)
            chunk.to(torch.cuda.current_device())  # the CPU after cpu.install()
        self.model = [
            DistributedDataParallel(self.config, _ddp_config(setup), chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        for chunk in self.model:
            chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-3, weight_decay=0.0, bf16=setup.bf16, params_dtype=self.config.params_dtype,
                fp16=setup.fp16, initial_loss_scale=2.0**24, loss_scale_window=4, hysteresis=1,
                use_distributed_optimizer=setup.distributed_optimizer, overlap_param_gather=setup.overlap_gather,
                clip_grad=1.0,
            ),
            self.model,
        )  # fmt: skip
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if setup.overlap:
            syncs = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        self._run = get_forward_backward_func()
        self._data: Any = [_data(setup, parallel_state.get_data_parallel_rank()) for _ in self.model]
        self.steps = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds: list[float] = []
        self._groups = _parallel_groups()

    def activate(self) -> None:
        """Let Megatron's functions use the groups of this training."""
        from megatron.core import parallel_state

        vars(parallel_state).update(self._groups)

    def step(self) -> None:
        """Take one training step."""
        begin = time.perf_counter()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self.run(forward_only=False)
        _, norm, _ = self.optimizer.step()
        # A step whose gradients are too large for fp16 has no norm, changes nothing, and makes the scale smaller.
        self.norms.append(-1.0 if norm is None else float(norm))
        self.steps += 1
        self.seconds.append(time.perf_counter() - begin)
        self.losses += [sum(map(_loss, found)) / len(found)] if found else []

    def run(self, forward_only: bool) -> list[Any]:
        """Run all microbatches; returns what the loss function returned for each, on the last stage."""
        setup = self.setup
        return self._run(  # type: ignore[no-any-return]
            forward_step_func=_forward_step(setup), data_iterator=self._data if setup.vpp else self._data[0],
            model=self.model if setup.vpp else self.model[0], num_microbatches=setup.microbatches,
            seq_length=setup.length, micro_batch_size=setup.samples, forward_only=forward_only,
        )  # fmt: skip

    def gather(self) -> None:
        """Gather all parameters now, not when the next forward pass needs them."""
        if self.setup.overlap_gather:
            for chunk in self.model:
                chunk.disable_forward_pre_hook()
                chunk.enable_forward_pre_hook()

    def skip(self, steps: int) -> None:
        """Skip the data of steps that were taken before a checkpoint."""
        self.steps = steps
        for data in self._data:
            for _ in range(steps * self.setup.microbatches):
                next(data)

    def result(self) -> Trained:
        """The result of all steps so far."""
        self.gather()
        digest = hashlib.sha256()
        for chunk in self.model:
            for _, parameter in sorted(chunk.named_parameters()):  # in the same order, however they are registered
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
        groups = sum(
            _group(each).size() > 1
            for chunk in self.model
            for each in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        )
        scale = float(self.optimizer.get_loss_scale())
        return Trained(list(self.losses), list(self.norms), digest.hexdigest(), scale, groups, list(self.seconds))

    def close(self) -> None:
        """Destroy the parallel groups."""
        from megatron.core import parallel_state

        if self.setup.overlap_gather:
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=False)
        self.activate()
        parallel_state.destroy_model_parallel()
        dist.barrier()


def _parallel_groups() -> dict[str, Any]:
    """The groups, which Megatron keeps in module variables, so that a process has one set of them."""
    from megatron.core import parallel_state

    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def _group(bucket_group: Any) -> Any:
    return getattr(bucket_group, "intra_distributed_optimizer_instance_group", None) or bucket_group.data_parallel_group


def _config(setup: Setup) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if setup.bf16 else torch.float16 if setup.fp16 else torch.float32
    experts: dict[str, Any] = {}
    if setup.experts:
        experts = {
            "num_moe_experts": setup.experts, "moe_router_topk": 2, "expert_model_parallel_size": setup.ep,
            "moe_token_dispatcher_type": "allgather", "moe_grouped_gemm": False, "add_bias_linear": False,
        }  # fmt: skip
    recompute: dict[str, Any] = {}
    if setup.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=setup.layers, hidden_size=setup.hidden, num_attention_heads=setup.heads,
        use_cpu_initialization=True, pipeline_dtype=dtype,
        params_dtype=dtype, bf16=setup.bf16, fp16=setup.fp16, tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp, virtual_pipeline_model_parallel_size=setup.vpp or None,
        context_parallel_size=setup.cp, sequence_parallel=setup.sp, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0,
        calculate_per_token_loss=setup.per_token, batch_p2p_comm=setup.batched, deallocate_pipeline_outputs=True,
        **experts, **recompute,
    )  # fmt: skip


def _ddp_config(setup: Setup) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.fp32_gradients, overlap_grad_reduce=setup.overlap,
        use_distributed_optimizer=setup.distributed_optimizer, overlap_param_gather=setup.overlap_gather,
        average_in_collective=setup.average, bucket_size=setup.bucket, check_for_nan_in_grad=setup.check_nan,
        num_distributed_optimizer_instances=setup.instances,
    )  # fmt: skip


def _chunks(setup: Setup, config: Any) -> list[torch.nn.Module]:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    spec = get_gpt_layer_local_spec(num_experts=setup.experts or None)
    if setup.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = context.Attention
    takes_stage = "vp_stage" in inspect.signature(GPTModel.__init__).parameters
    chunks = []
    for stage in range(max(setup.vpp, 1)):
        if setup.vpp:
            ps.set_virtual_pipeline_model_parallel_rank(stage)
        stages = {"ignore_virtual": False, "vp_stage": stage} if setup.vpp and takes_stage else {}
        chunk: torch.nn.Module = GPTModel(
            config, spec, vocab_size=setup.words,
            max_sequence_length=setup.length, pre_process=ps.is_pipeline_first_stage(**stages),
            post_process=ps.is_pipeline_last_stage(**stages), parallel_output=True, position_embedding_type="rope",
            share_embeddings_and_output_weights=setup.shared_embeddings,
            **({"vp_stage": stage} if setup.vpp and takes_stage else {}),
        )  # fmt: skip
        chunks.append(Float16Module(config, chunk) if setup.bf16 or setup.fp16 else chunk)
    return chunks


def _data(setup: Setup, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + rank)
    samples = [torch.randint(0, setup.words, (setup.samples, setup.length + 1), generator=generator) for _ in range(4)]
    while True:
        yield from samples


def _forward_step(setup: Setup) -> Any:
    def forward_step(data: Iterator[torch.Tensor], model: Any) -> Any:
        words = next(data).to(torch.cuda.current_device())
        tokens, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        samples, length = tokens.shape
        positions = torch.arange(length, device=words.device).unsqueeze(0).expand(samples, length)
        if setup.cp > 1:
            tokens, labels, positions = context.own_part(tokens, labels, positions)
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=words.device), 1)[None, None]

        def loss(output: torch.Tensor) -> Any:
            if setup.per_token:
                count = torch.tensor(output.numel(), dtype=torch.int, device=words.device)
                return output.sum(), count, {"loss": float(output.detach().sum()) / output.numel()}
            mean = output.float().mean()
            if setup.cp > 1:
                mean, shown = mean / setup.cp, context.mean(mean.detach())
                return mean, {"loss": float(shown)}
            return mean, {"loss": float(mean.detach())}

        return model(tokens, positions, mask, labels=labels), loss

    return forward_step


def _loss(found: Any) -> float:
    return float(found["loss"])
