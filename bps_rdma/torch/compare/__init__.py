"""`ddp_bench`: one model, trained with each strategy of ours and with torch's DDP, side by side.

How it is put together: cli.py reads the options; launch.py starts the ranks and drives them turn by turn, so that all
contenders (contenders.py) meet the same machine; member.py is a rank; models.py has the models; figures.py turns times
into figures, and report.py shows them.
"""


def main() -> None:
    """Entry point of `python -m bps_rdma.torch.compare`; see bps_rdma.bench.ddp for the command."""
    from bps_rdma.terminal import run_app
    from bps_rdma.torch.compare.cli import app

    run_app(app, "ddp_bench")
