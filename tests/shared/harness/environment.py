# SPDX-License-Identifier: Apache-2.0
"""What the processes of a test's job see: their variables, and the programs that they are."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .ports import LOOPBACK
from .waiting import PATIENCE

# Whatever would tell a rank who it is, or how to behave.
_SCRUBBED = ("BPS_", "BYTEPS_", "DMLC_", "PS_", "NCCL_", "MASTER_", "TORCHELASTIC_", "ROLE_", "GROUP_")
IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def clean_env(**extra: str) -> dict[str, str]:
    """The environment of this process without anything that bps_rdma or a launcher would read.

    A busy machine may take more than the default of BPS_JOIN_TIMEOUT to start ranks that import torch.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED) and name not in IDENTITY
    }
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "BPS_JOIN_TIMEOUT": "180"} | extra


def of_rank(rank: int, size: int, port: int, root: str = LOOPBACK) -> dict[str, str]:
    """What launchers tell a rank of several on this machine, whose rank 0 is reached there."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": root, "MASTER_PORT": str(port),
    }  # fmt: skip


def of_roles(workers: int, servers: int, port: int, root: str = LOOPBACK) -> dict[str, str]:
    """What every member of a job is told that has a scheduler there; DMLC_ROLE says which one it is."""
    return {
        "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers), "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": str(port),
    }  # fmt: skip


def over(transport: str) -> dict[str, str]:
    """The environment of a job whose data goes over this transport; rdma: on the device under test."""
    device = {"BPS_RDMA_HCA": f"={os.environ.get('BPS_TEST_HCA', '')}"} if transport == "rdma" else {}
    return {"BPS_TRANSPORT": transport} | device


def on_hosts(layout: str) -> dict[str, Any]:
    """Options of a job whose ranks take this machine for several hosts: "aab" has two ranks on one and one on another.

    Ranks with different letters reach each other by TCP only.
    """
    return {"workers": len(layout), "rank_env": [{"BPS_HOST_ID": host} for host in layout]}


def cut_at(size: int) -> dict[str, str]:
    """The environment of a job that cuts tensors into partitions of exactly so many bytes."""
    return {"BYTEPS_PARTITION_BYTES": str(size), "BPS_MIN_PARTITION_BYTES": str(size)}


def binary(name: str) -> str:
    """Path of a plain binary or a command: in BPS_TEST_BIN, beside this Python, or on PATH."""
    folders = [os.environ.get("BPS_TEST_BIN", ""), str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    found = shutil.which(name, path=os.pathsep.join(filter(None, folders))) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; set BPS_TEST_BIN to the folder it is in")
    return found


def run_command(
    words: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | str = "/", within: float = 180
) -> subprocess.CompletedProcess[str]:
    """How a command ends: its status, its output and its errors. Default: of clean_env(), and of no folder of ours."""
    return subprocess.run(
        words, env=clean_env() if env is None else env, cwd=cwd, timeout=within * PATIENCE, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def lines_of(commands: Iterable[tuple[Sequence[str], Mapping[str, str]]]) -> list[str]:
    """What commands that run together print, each in its environment, in order, once all have ended well."""
    started = [
        subprocess.Popen(words, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words, env in commands
    ]
    texts = [process.communicate(timeout=60 * PATIENCE)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), texts
    return sorted(line for text in texts for line in text.splitlines())
