# SPDX-License-Identifier: Apache-2.0
"""pushpull_bench: measures push/pull on this machine, beside baselines and an upper bound, and checks every result.

Structure: cli.py reads the options into a plan (plan.py). launch.py starts the ranks and drives them round by round.
Each rank (worker.py) runs the rounds of every implementation (measure.py, baselines.py, peers/, bound.py)
and checks the results (pattern.py). report.py and plot.py show them. Inside a running job, rank.py measures without a
launcher. allreduce.py is a separate command that makes the same measurement for several numbers of ranks.
"""


def main() -> None:
    """Entry point of the command `pushpull_bench`."""
    from bps_rdma.terminal import run_app
    from bps_rdma.tools.bench.cli import app  # imports typer: commands only

    run_app(app, "pushpull_bench")
