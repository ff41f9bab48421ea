"""`python -m bps_rdma.megatron pretrain_gpt.py ...`: a script of Megatron's, unchanged, with flags of ours.

Start it as that script is started: `torchrun ... -m bps_rdma.megatron pretrain_gpt.py ... --use-dpu-reduce`. Without a
flag of ours nothing of Megatron is touched.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.megatron.adapter import enable
from bps_rdma.megatron.arguments import FLAGS, extend_parser
from bps_rdma.terminal import print_error


def main() -> None:
    """Entry point."""
    arguments = sys.argv[1:]
    try:
        if not arguments or arguments[0].startswith("-"):
            raise InvalidArgumentError(
                "the script to run is missing", "python -m bps_rdma.megatron pretrain_gpt.py [its arguments] [flags]"
            )
        script = Path(arguments[0])
        if not script.is_file():
            raise InvalidArgumentError(f"there is no script {script}", "name Megatron's pretrain_gpt.py, or yours")
        wanted = [flag for flag in FLAGS if flag in arguments]
        sys.argv = arguments
        sys.path.insert(0, str(script.resolve().parent))
        if wanted:
            if not extend_parser():
                sys.argv = [word for word in arguments if word not in FLAGS]
            enable(use_dpu_reduce="--use-dpu-reduce" in wanted, use_dpu_tp_reduce="--use-dpu-tp-reduce" in wanted)
    except BpsError as error:
        print_error(error.message, error.hint)
        sys.exit(1)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
