# SPDX-License-Identifier: Apache-2.0
"""How each program of this repository is run in a short form, or what else runs it.

A program without a line here is an error, because nobody would notice when it no longer works.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A command of the shell in the checkout, which ends with 0; $OUT is an empty folder, $BUILD has the C++ programs.

    What it prints has a line in which `shows` is found. That line is one that it prints after it has measured; the
    programs themselves check every sum.
    """

    command: str
    shows: str
    root: bool = False  # it makes namespaces

    @property
    def name(self) -> str:
        """What the test is called."""
        return self.command.replace("/", "_")


RANKS = "bps run -np 2"
RUNS = {
    "bench/codec_bench.cc": [Run("$BUILD/codec_bench int8", r'"add_gbps"')],
    "bench/exact_bench.cc": [Run("$BUILD/exact_bench baseline bfloat16", r'"repaired"')],
    "bench/path_bench.cc": [Run("$BUILD/path_bench traced 1024 && echo walked", "walked")],
    "bench/reduce_bench.cc": [Run("$BUILD/reduce_bench baseline", r'"share"')],
    "bench/scheduler_bench.cc": [Run("$BUILD/scheduler_bench 64 2", r'"leave"')],
    "bench/compressed_steps.py": [
        Run("python bench/compressed_steps.py --rate 1000 --rounds 2 --plot $OUT/steps.png", r"^bps, onebit", root=True)
    ],
    "bench/compressed_training.py": [
        Run(
            f"BPS_TRANSPORT=tcp BPS_MIN_COMPRESS_BYTES=1024 {RANKS} --servers 1 python bench/compressed_training.py "
            "--steps 40 --methods 'none int8' --models gpt",
            r"int8 .*loss \d",
        )
    ],
    "bench/cpp_backend.py": [Run("python bench/cpp_backend.py --rounds 3", r"at most .* times as fast")],
    "bench/endurance.py": [
        Run("python bench/endurance.py --minutes 0.3 --faults 2 --ranks 3 --jobs 2", r"^all: no step for .* s lost")
    ],
    "bench/exact_sums.py": [
        Run(f"{RANKS} python bench/exact_sums.py --rounds 3 --sizes 64", r"^float64 long .* [1-9]\d* repaired")
    ],
    "bench/failover_cost.py": [
        Run("python bench/failover_cost.py --transport tcp --sizes 0.0625 --rounds 3", r"^tcp, .*failover \d"),
        Run("python bench/failover_cost.py --hosts aabb --sizes 0.0625 --rounds 3", r"^tcp, .*failover \d"),
    ],
    "bench/flood.py": [
        Run(f"{RANKS} --transport tcp bench/flood.py --pairs 2 --seconds 0.2", r"^silent, at the scheduler: \d+ conn")
    ],
    "bench/growth.py": [
        Run("python bench/growth.py --partitions 10,100 --workers 2", r"^2 workers,  10,000 partitions: declare +\d")
    ],
    "bench/link_lab.py": [
        Run("python bench/link_lab.py --workers 4 --size 1M --rounds 3", r"times as fast as gloo", root=True),
        Run(
            "python bench/link_lab.py --workers 2 --servers 2 --size 256K --rounds 3 --ranks-per-host 1,2 "
            "--plot $OUT/lab.png",
            r"times as fast as gloo",
            root=True,
        ),
        Run(
            "python bench/link_lab.py --workers 2 --servers 0,1 --size 256K --rounds 3 --json $OUT/lab.json && "
            "python bench/link_lab.py --draw $OUT/lab.json --plot $OUT/lab.png",
            r"^wrote .*lab.png",
            root=True,
        ),
        Run("python bench/link_lab.py --workers 2 --least 1 --size 256K --rounds 3 --no-gloo", r"of line", root=True),
    ],
    "bench/link_drop.py": [
        # So many rounds that the job notices: a spare host sums 0.4, and with a quarter of its link 0.11.
        Run(
            "python bench/link_drop.py --workers 3 --size 4M --rounds 16",
            r"^server 0 sums 0\.\d+, then 0\.\d+.*; [1-9]\d* shifts; [1-9]\d* results checked, all exact",
            root=True,
        )
    ],
    "bench/messages.py": [Run("python bench/messages.py --rounds 3", r"scatter .* times as fast")],
    "bench/on_links.py": [
        Run(
            "python bench/on_links.py --rate 400 examples/megatron/compare.py --hidden 64 --layers 1 --words 512 "
            "--distributed-optimizer --kinds stock,steps-abc --rounds 1 --steps 1",
            r"^A step without sending",
            root=True,
        )
    ],
    "bench/parallel_training.py": [
        Run("python bench/parallel_training.py --rounds 2 --steps 2 --width 32", r"1F1B: bps .* times as fast")
    ],
    "bench/priority.py": [
        Run(f"BYTEPS_SCHEDULING_CREDIT=4194304 {RANKS} bench/priority.py --rounds 2", r"^urgent 1 MiB .* ratio \d")
    ],
    "bench/ray_cost.py": [
        Run("python bench/ray_cost.py --pairs 2 --steps 20 --elements 1000", r"its processor time \| \d")
    ],
    "bench/ray_failures.py": [
        Run("python bench/ray_failures.py --rounds 1 --only 'killed worker,ray stop'", r"stop \| all gone", root=True)
    ],
    "bench/rdma_figures.py": [
        Run(
            "ci/vm/run --out $OUT .venv/bin/python bench/rdma_figures.py --sizes 1 --rounds 2",
            r"^8 bytes: push_pull \d",
        )
    ],
    "bench/rdma_memory.py": [
        Run("ci/vm/run .venv/bin/python bench/rdma_memory.py --sizes 64 --rounds 2", r"^64 KiB, new, staged: \d")
    ],
    "bench/recovery.py": [
        Run("python bench/recovery.py --trials 1 --ranks 3", "every sum was right"),
        Run(
            "python bench/recovery.py --trials 1 --ranks 2 --victim scheduler --replace --steps-after 5",
            "every sum was right",
        ),
    ],
    "bench/restart_baseline.py": [
        Run("python bench/restart_baseline.py --trials 1 --ranks 2", r"next right sum on every rank: median \d")
    ],
    "bench/scale_model.py": [
        Run("python bench/scale_model.py --plot $OUT/placement.png", r"^wrote "),
        Run(
            "python bench/link_lab.py --workers 2 --size 256K --rounds 3 --json $OUT/lab.json && "
            "python bench/scale_model.py --lab $OUT/lab.json",
            r"gloo: measured \d.* a ring",
            root=True,
        ),
    ],
    "bench/set_up.py": [Run(f"{RANKS} bench/set_up.py --idle 1", r"^rank 1: .* tensors declared in \d")],
    "bench/start_up.py": [Run(f"{RANKS} bench/start_up.py", r"^2 ranks on \d+ cores: at least")],
    "bench/torch_backend.py": [Run("python bench/torch_backend.py --rounds 3", r"of the native rate")],
    "bench/trace_cost.py": [
        Run("python bench/trace_cost.py --pairs 6 --seconds 0.05", r"^between turns without one: [+-]\d")
    ],
    "bench/tune_grid.py": [
        Run("python bench/tune_grid.py --transport tcp --gradients 1M --cycles 1", r"the recommendation takes"),
        Run("python bench/tune_grid.py --link 1000 --gradients 1M --cycles 1", r"the recommendation takes", root=True),
    ],
    "pushpull_bench": [
        Run("pushpull_bench --sizes 4K --iters 3 --compare gloo --plot $OUT/out.png", "checked, all exact")
    ],
    "allreduce_bench": [
        Run("allreduce_bench --sizes 4K --iters 3 --ranks 2 --backends bps,gloo", "checked, all exact")
    ],
    "ddp_bench": [
        Run(
            "ddp_bench --model mlp --rounds 1 --steps 1 --buckets 10 --strategies bucketed,ddp-gloo",
            r"All methods reached the same weights",
        ),
        Run(
            "ddp_bench --model mlp --rounds 1 --steps 1 --buckets 10 --strategies bucketed,sharded --optimizer adamw "
            "--memory --profile $OUT/profiles",
            r"sharded 10 MB +3.0 +3.0 +4.0",
        ),
    ],
}

# Lines of pages that are not run there, and that name no program of the table above.
OF_PAGES = [
    Run("bps tune --np 2 --transport tcp --gradients 1M --plot $OUT/tune.png", r"^# a step: .* measured"),
    Run("torchrun --nproc-per-node 2 --no-python bps tune --gradients 1M --json", r'"measured_s"|"step"'),
    Run("python tests/model/check.py --only 'scheduler DEATHS=1' --keep $OUT", r"^scheduler DEATHS=1: holds"),
    Run("$BUILD/../tests/sim/bps_sim --show 237", r"."),
    Run("$BUILD/../tests/sim/bps_sim --actions rounds 1 5", r"."),
]

# What needs something that no machine of these tests has: its --help runs, or it compiles where it has none.
NOT_HERE = {
    "bench/gpu_staging.py": "needs a GPU",
}

# What another test runs, or a program of these does: that file has the program's name in it.
ELSEWHERE = {
    "bench/endurance_rank.py": "bench/endurance.py",
    "bench/instructions.py": "ci/steps/cost",
    "bench/framework_steps.py": "bench/parallel_training.py",
    "bench/side_by_side.py": "bench/messages.py",
    "bench/message_ranks.py": "bench/messages.py",
    "bps": "tests/python/commands/test_command_line.py",
    "bpslaunch": "tests/python/commands/test_command_line.py",
    "bps_rdma/tools/bench/__main__.py": "tests/python/commands/test_pushpull_bench.py",
    "bps_rdma/tools/bench/peers/__main__.py": "ci/setup",
    "bps_rdma/tools/compare/__main__.py": "tests/torch/test_compare.py",
    "examples/train.py": "tests/torch/test_examples.py",
    "examples/megatron/checkpoint.py": "examples/megatron/pretrain.py",
    "examples/megatron/cluster.sh": "tests/megatron/test_examples.py",
    "examples/megatron/common.py": "examples/megatron/pretrain.py",
    "examples/megatron/compare.py": "tests/megatron/test_examples.py",
    "examples/megatron/context.py": "examples/megatron/gpt.py",
    "examples/megatron/cpu.py": "tests/megatron/conftest.py",
    "examples/megatron/figures.py": "examples/megatron/compare.py",
    "examples/megatron/gpt.py": "examples/megatron/pretrain.py",
    "examples/megatron/on_cpu.py": "tests/megatron_suite/test_pretrain_gpt.py",
    "examples/megatron/pretrain.py": "tests/megatron/test_examples.py",
    "examples/frameworks/accelerated.py": "tests/frameworks/test_frameworks.py",
    "examples/frameworks/fabric.py": "tests/frameworks/test_frameworks.py",
    "examples/frameworks/lightning_module.py": "tests/frameworks/test_frameworks.py",
    "examples/frameworks/trainer.py": "tests/frameworks/test_frameworks.py",
    "examples/frameworks/zero.py": "tests/frameworks/test_frameworks.py",
    "examples/frameworks/fsdp.py": "tests/torch/test_parallelism.py",
    "examples/frameworks/pipeline.py": "tests/torch/test_parallelism.py",
    "examples/frameworks/tensor_parallel.py": "tests/torch/test_parallelism.py",
    "examples/torchft/train.py": "tests/frameworks/test_torchft.py",
    "examples/ray/lora.py": "tests/ray/test_ray_examples.py",
    "examples/ray/train.py": "tests/ray/test_ray_examples.py",
    "examples/ray/training.py": "examples/ray/train.py",
    "examples/slurm/nodes.sbatch": "tests/slurm/test_slurm_jobs.py",
    "examples/slurm/pool-prolog.sh": "tests/python/pools/test_prolog.py",
    "examples/slurm/ranks.sbatch": "tests/slurm/test_slurm_jobs.py",
    "examples/slurm/servers.sbatch": "tests/slurm/test_slurm_jobs.py",
    "examples/slurm/torchrun.sbatch": "tests/slurm/test_slurm_jobs.py",
}
