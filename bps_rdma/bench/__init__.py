"""pushpull_bench: what push/pull does on this machine, every result checked, beside gloo and the machine's bound.

How it is put together: cli.py reads the options into a plan (plan.py). launch.py starts the ranks and drives them round
by round; each rank (worker.py) runs the rounds of every contender (measure.py, contenders.py, peers/, bound.py) and
checks them (pattern.py). report.py and plot.py show what came out. Inside a running job, rank.py measures alone.
allreduce.py is a command of its own: the same measurement at several numbers of ranks, in one table.
"""


def main() -> None:
    """Entry point of the command `pushpull_bench`."""
    from bps_rdma.bench.cli import app  # imports typer: commands only
    from bps_rdma.terminal import run_app

    run_app(app, "pushpull_bench")
