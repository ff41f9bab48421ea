# SPDX-License-Identifier: Apache-2.0
"""Flags, refusals, and what the adapter leaves alone."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu
import gpt
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup

import bps_rdma
from bps_rdma import megatron
from bps_rdma.megatron.arguments import check_version


def functions() -> dict[str, Any]:
    """Every function and method of what the adapter might touch."""
    from megatron.core import distributed, parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    found: dict[str, Any] = {}
    for owner in (distributed, parallel_state, param_and_grad_buffer):
        for name, value in vars(owner).items():
            found[f"{owner.__name__}.{name}"] = value
            if isinstance(value, type):
                found |= {f"{owner.__name__}.{name}.{inner}": each for inner, each in vars(value).items()}
    return found


@pytest.mark.core
def test_without_the_flag_nothing_is_touched():
    before = functions()
    assert megatron.enable(SimpleNamespace(use_dpu_reduce=False)) is False
    assert megatron.enable(use_dpu_reduce=False) is False
    assert functions() == before
    assert megatron.enable(SimpleNamespace(use_bps=False)) is False
    with megatron.enabled(SimpleNamespace(use_bps=True)) as on:
        assert on
    with megatron.enabled(SimpleNamespace(use_dpu_reduce=True, use_dpu_tp_reduce=True)) as on:
        assert on
        changed = {name for name, value in functions().items() if value is not before[name]}
        assert all(name.endswith(("__init__", "initialize_model_parallel")) for name in changed)
        assert changed
    assert functions() == before


@pytest.mark.core
@pytest.mark.parametrize(
    "option", ["use_megatron_fsdp", "use_torch_fsdp2", "reduce_scatter_with_fp32_accumulation", "overlap_param_gather"]
)
def test_what_is_not_supported_is_refused(option):
    before = functions()
    with pytest.raises(bps_rdma.InvalidArgumentError, match="use_bps"):
        megatron.enable(SimpleNamespace(use_dpu_reduce=True, **{option: True}))
    assert functions() == before
    with pytest.raises(bps_rdma.InvalidArgumentError, match=r"0\.13\.1 is older"):
        check_version("0.13.1")
    check_version("0.14.0rc1")


def test_the_flags_fit_a_parser_of_megatrons():
    parser = megatron.add_flags(argparse.ArgumentParser())
    assert parser.parse_args([]).use_dpu_reduce is False
    for words in (["--use-dpu-reduce", "--use-dpu-tp-reduce"], ["--use-bps", "--use-bps-tp"]):
        found = parser.parse_args(words)
        assert found.use_dpu_reduce
        assert found.use_dpu_tp_reduce
    assert not parser.parse_args(["--use-bps"]).use_dpu_tp_reduce
    assert parser.parse_args(["--use-bps-pp"]).use_bps_pp


@harness.on_ranks(workers=2, init=False)
def test_a_model_says_in_its_configuration_whether_it_uses_it(bps: Any) -> None:
    """Tensors over push/pull after the steps of a model that has use_bps=False, and of one that has it."""
    from bps_rdma.megatron.communicator import counts
    from bps_rdma.megatron.config import DistributedDataParallelConfig

    cpu.install()
    dist.init_process_group("gloo")
    made, results = [], []
    with megatron.enabled(DistributedDataParallelConfig()) as on:
        assert on
        for use_bps in (False, True):
            gpt._ddp_config = lambda setup, use_bps=use_bps: DistributedDataParallelConfig(
                bucket_size=setup.bucket, use_bps=use_bps
            )
            results.append(gpt.train(Setup(steps=2)))
            made.append(sum(counts.values()))
    assert not megatron.enable(DistributedDataParallelConfig(use_bps=False))
    stock, ours = made
    assert stock == 0
    assert ours > 0
    assert results[0] == results[1]


def bytes_moved(bps: Any, distributed: bool) -> tuple[int, int]:
    """Bytes of gradients that this rank pushes in one step, and pulls."""
    from bps_rdma.operations import start as operations

    cpu.install()
    dist.init_process_group("gloo")
    pushed, pulled = [], []
    start = operations._start

    def note(kind: Any, source: Any, target: Any, *arguments: Any, **options: Any) -> Any:
        if kind.name in ("push_pull", "reduce_scatter"):
            pushed.append(source.nbytes)
            pulled.append(target.nbytes)
        return start(kind, source, target, *arguments, **options)

    with megatron.enabled():
        operations._start = note
        gpt.train(Setup(steps=1, distributed_optimizer=distributed))
    return sum(pushed), sum(pulled)


@pytest.mark.core
def test_the_distributed_optimizer_pulls_its_shard_only():
    for pushed, pulled in harness.run(bytes_moved, True, workers=4, init=False):
        assert pushed > 0
        assert pulled * 4 == pushed
    for pushed, pulled in harness.run(bytes_moved, False, workers=2, init=False):
        assert pulled == pushed > 0


@pytest.mark.core
@harness.on_ranks(workers=2, init=False)
def test_no_gradient_goes_through_torch(bps: Any) -> None:
    """No gradient goes through a group of torch's: theirs are made to fail."""
    cpu.install()
    dist.init_process_group("gloo")
    real = dist.ProcessGroup.allreduce_coalesced
    calls: list[int] = []

    def count(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return real(self, *arguments)

    dist.ProcessGroup.allreduce_coalesced = count
    gpt.train(Setup(steps=2))
    assert calls, "stock Megatron does not do what this test watches"
    calls.clear()
    with megatron.enabled():
        gpt.train(Setup(steps=2))
    assert not calls


def killed(bps: Any) -> tuple[str, str]:
    """Rank 1 dies in its third step."""
    from megatron.core.distributed import param_and_grad_buffer

    cpu.install()
    dist.init_process_group("gloo")
    steps: list[int] = []
    start = param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync

    def count(self: Any, *arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        return start(self, *arguments, **options)

    param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync = count
    try:
        with megatron.enabled():
            gpt.train(Setup())
    except bps.BpsError as error:
        return type(error).__name__, str(error)
    return "", "nothing happened"


@pytest.mark.core
def test_a_rank_that_dies():
    env = {"BPS_SHUTDOWN_TIMEOUT": "1"}
    with harness.start(killed, workers=2, init=False, env=env) as job:
        outcomes = job.outcomes()
    kind, text = outcomes[0].value
    assert kind == "PeerLostError", text
    assert "megatron 0 0 data_parallel_group sum 0" in text


def moved(bps: Any, mapped: bool) -> bool:
    """Gradient buffers whose memory is given back and got anew; False where this Megatron cannot do that."""
    from megatron.core.distributed import DistributedDataParallel

    cpu.install()
    dist.init_process_group("gloo")
    made: list[Any] = []
    with megatron.enabled(use_dpu_reduce=mapped):
        initialise = DistributedDataParallel.__init__

        def note(self: Any, *arguments: Any, **options: Any) -> None:
            initialise(self, *arguments, **options)
            made.append(self)

        DistributedDataParallel.__init__ = note
        gpt.train(Setup(steps=1))
        DistributedDataParallel.__init__ = initialise
    (ddp,) = made
    if not mapped:  # made before bps_rdma was there: its buffers are ordinary memory
        assert megatron.attach(ddp) > 0
    if not hasattr(ddp, "offload_grad_buffers"):
        return False
    for step in range(3):
        ddp.offload_grad_buffers(synchronize=False, empty_cache=False)
        ddp.restore_grad_buffers(synchronize=False)
        for buffer in ddp.buffers:
            assert not buffer.grad_data.any()
            buffer.grad_data.fill_(dist.get_rank() + step)
        for group in ddp.bucket_groups:
            group.is_first_batch = False
            group.start_grad_sync()
        for buffer in ddp.buffers:
            expected = (0.5 + step) * 2 * (0.5 if ddp.bucket_groups[0].buckets[0].gradient_scaling_factor == 0.5 else 1)
            assert torch.equal(buffer.grad_data, torch.full_like(buffer.grad_data, expected))
    return True


@pytest.mark.core
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "plain"])
def test_buffers_that_move(mapped):
    if not all(harness.run(moved, mapped, workers=2, init=False)):
        pytest.skip("this version of Megatron cannot offload its gradient buffers")


# ---- The command


def run_script(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(bps_rdma.__file__).parent.parent)
    env = harness.clean_env(PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "bps_rdma.megatron", *arguments]
    return harness.run_command(command, env=env, cwd=tmp_path, within=120)


def test_the_command_runs_a_script_as_it_is(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys\nfrom megatron.core.distributed import DistributedDataParallel as D\n"
        "print(__name__, sys.argv[1:], D.__init__.__module__, hasattr(D.__init__, '__wrapped__'))\n"
    )
    ours = run_script(tmp_path, "pretrain.py", "--use-dpu-reduce", "--lr", "1")
    assert ours.stdout.rstrip().endswith("True"), ours.stderr
    (plain,) = harness.scripts("-m", "bps_rdma.megatron", "pretrain.py", "--lr", "1", folder=tmp_path)
    assert plain.stdout.split("\n")[0].startswith("__main__ ['--lr', '1']"), plain.stderr
    assert plain.stdout.rstrip().endswith("False")
    for wrong in ([], ["nothing.py"], ["--use-dpu-reduce"]):
        (done,) = harness.scripts("-m", "bps_rdma.megatron", *wrong, folder=tmp_path)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "hint" in done.stderr


# ---- Adapters that never train


def test_frozen_embeddings_can_pass_gradients():
    from torch.utils.checkpoint import checkpoint

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(8, 4).requires_grad_(False)
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layer, self.embedding(words), use_reentrant=True).sum()

    model = Model()
    words = torch.arange(8)
    out = model(words)
    assert not out.requires_grad
    with pytest.warns(UserWarning, match=r"2 trained parameters got no gradient.*layer.weight.*let_embeddings"):
        assert megatron.warn_of_untrained([model]) == ["layer.weight", "layer.bias"]
    assert megatron.let_embeddings_pass_gradients(model) == 1
    model(words).backward()
    assert megatron.warn_of_untrained([model]) == []
    model.eval()
    with torch.no_grad():
        assert not model.embedding(words).requires_grad
