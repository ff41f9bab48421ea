# SPDX-License-Identifier: Apache-2.0
"""Ranks that mpirun and its like start, and processes that are told half of what a rank must know."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch import cluster

BPS = harness.binary("bps")
RANK = """
import os, bps_rdma, numpy
before = bps_rdma.local_rank(), bps_rdma.local_size()
bps_rdma.init()
assert before == (bps_rdma.local_rank(), bps_rdma.local_size())
total = bps_rdma.push_pull(numpy.float32([bps_rdma.rank() + 1]), average=False, name="x")[0]
os.write(1, f"rank {bps_rdma.rank()} of {bps_rdma.size()}, local {before}: {total}\\n".encode())
bps_rdma.shutdown()
"""
PLAIN = [sys.executable, "-c", RANK]

# What each launcher sets for rank {r} of {n} on one host; the last: also what names the job.
ON_ONE_HOST = {
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "{r}", "OMPI_COMM_WORLD_SIZE": "{n}", "OMPI_COMM_WORLD_LOCAL_RANK": "{r}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "{n}", "PMIX_RANK": "{r}", "PMIX_NAMESPACE": "prterun-{job}@1",
        "PMIX_SERVER_URI2": "x",
    },
    "MPICH and Intel MPI": {"PMI_RANK": "{r}", "PMI_SIZE": "{n}", "MPI_LOCALRANKID": "{r}", "MPI_LOCALNRANKS": "{n}"},
    "MVAPICH": {
        "MV2_COMM_WORLD_RANK": "{r}", "MV2_COMM_WORLD_SIZE": "{n}", "MV2_COMM_WORLD_LOCAL_RANK": "{r}",
        "MV2_COMM_WORLD_LOCAL_SIZE": "{n}",
    },
    "PALS": {
        "PALS_RANKID": "{r}", "PALS_LOCAL_RANKID": "{r}", "PALS_LOCAL_SIZE": "{n}", "PALS_APID": "{job}",
        "PMI_RANK": "{r}", "PMI_SIZE": "{n}", "PMI_LOCAL_RANK": "{r}", "PMI_LOCAL_SIZE": "{n}",
    },
    "JSM": {
        "JSM_NAMESPACE_RANK": "{r}", "JSM_NAMESPACE_SIZE": "{n}", "JSM_NAMESPACE_LOCAL_RANK": "{r}",
        "JSM_NAMESPACE_LOCAL_SIZE": "{n}", "PMIX_RANK": "{r}", "PMIX_NAMESPACE": "{job}",
    },
    "Flux": {
        "FLUX_TASK_RANK": "{r}", "FLUX_JOB_SIZE": "{n}", "FLUX_TASK_LOCAL_ID": "{r}", "FLUX_JOB_NNODES": "1",
        "FLUX_JOB_ID": "f{job}",
    },
    "PMI": {"PMI_RANK": "{r}", "PMI_SIZE": "{n}", "PMI_LOCAL_RANK": "{r}", "PMI_LOCAL_SIZE": "{n}"},
}  # fmt: skip


def told(launcher: str, rank: int, size: int, job: str = "") -> dict[str, str]:
    known = ON_ONE_HOST[launcher].items()
    return {name: value.format(r=rank, n=size, job=job or os.getpid()) for name, value in known}


@pytest.mark.parametrize("launcher", ON_ONE_HOST)
def test_ranks_meet_by_the_variables_of_their_launcher(launcher):
    environments = [harness.clean_env(**told(launcher, rank, 2)) for rank in range(2)]
    shells = [["sh", "-c", 'exec "$0" "$@"', *PLAIN], ["sh", "-c", '"$0" "$@"; exit $?', *PLAIN]]  # and their wrappers
    assert harness.lines_of(zip(shells, environments, strict=True)) == [
        f"rank {r} of 2, local ({r}, 2): 3.0" for r in range(2)
    ]


def test_bps_run_in_every_rank_of_mpirun():
    run = [BPS, "run", "-np", "2", *PLAIN]
    lines = harness.lines_of((run, harness.clean_env(**told("Open MPI", rank, 2, "runs"))) for rank in range(2))
    assert lines == [f"rank {r} of 4, local ({r}, 4): 10.0" for r in range(4)]


def two_jobs(launcher: str) -> list[str]:
    """What the ranks print of two jobs at once that have the same variables, each under a shell of its own."""
    both = [f"{name}={value}" for name, value in told(launcher, 9, 2, "x").items()]
    lines = [" ".join(both).replace("=9", f"={rank}") + ' "$0" "$@" &' for rank in range(2)]
    job = ["sh", "-c", "\n".join([*lines, "wait"]), *PLAIN]
    return harness.lines_of([(job, harness.clean_env())] * 2)


def test_two_jobs_of_mpich_at_once_do_not_meet():
    """Nothing in the variables tells them apart: the process that has started the ranks does."""
    assert two_jobs("MPICH and Intel MPI") == [f"rank {r} of 2, local ({r}, 2): 3.0" for r in (0, 0, 1, 1)]


# ---- On several hosts

SEVERAL = {name: value.format(r=2, n=4, job=7) for name, value in ON_ONE_HOST["Open MPI"].items()} | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"
}  # fmt: skip


def adopted(**env: str) -> dict[str, str]:
    after = dict(env)
    cluster.adopt(after, {})
    return {name: value for name, value in after.items() if env.get(name) != value}


def test_on_several_hosts_master_addr_says_where_rank_0_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"mpirun of Open MPI .* rank 2 of 4 .* MASTER_ADDR is not set.*-x"):
        adopted(**SEVERAL)
    found = adopted(**SEVERAL, MASTER_ADDR="node1")
    assert 20000 <= int(found.pop("MASTER_PORT")) < 32768
    assert found == {
        "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "BPS_JOB_ID": "ompi-prterun-7@1", "BPS_SECRET_FILE": str(tmp_path / ".config/bps_rdma/secret"),
    }  # fmt: skip


def test_hydra_names_no_job_on_several_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    hydra = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node1"}
    with pytest.raises(InvalidArgumentError, match="MASTER_PORT is not set"):
        adopted(**hydra)
    found = adopted(**hydra, MASTER_PORT="29500")
    assert (found["RANK"], "BPS_JOB_ID" in found) == ("2", False)


# ---- What is half given


def inits(bps: Any, cases: list[dict[str, str]]) -> list[str]:
    """What becomes of a process that is told this: the size of its job, or an error."""
    said, clean = [], harness.clean_env()
    for env in cases:
        os.environ.clear()
        os.environ.update(clean | env)
        try:
            bps.init()
            said.append(f"size {bps.size()}")
            bps.shutdown()
        except bps.BpsError as error:
            said.append(str(error))
    return said


def starts(*cases: dict[str, str]) -> list[str]:
    (said,) = harness.run(inits, list(cases), workers=1, init=False)
    return said


HALVES = [
    ({"RANK": "0"}, "RANK=0, but WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0, but WORLD_SIZE is not set"),
    ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2, but WORLD_SIZE is not set"),
    ({"BYTEPS_LOCAL_RANK": "0", "BYTEPS_LOCAL_SIZE": "2"}, "BYTEPS_LOCAL_RANK=0, but WORLD_SIZE is not set"),
    ({"DMLC_NUM_WORKER": "2"}, "DMLC_NUM_WORKER=2, but DMLC_ROLE is not set"),
    ({"DMLC_WORKER_ID": "0"}, "DMLC_WORKER_ID=0, but DMLC_ROLE is not set"),
    ({"DMLC_ROLE": "worker"}, "DMLC_ROLE=worker, but DMLC_NUM_WORKER is not set"),
    (
        {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"},
        "DMLC_NUM_WORKER=2, but DMLC_WORKER_ID is not set",
    ),
    (
        {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "BYTEPS_LOCAL_SIZE": "2", "DMLC_NUM_SERVER": "1"},
        "BYTEPS_LOCAL_SIZE=2, but BYTEPS_LOCAL_RANK is not set",
    ),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0.*OMPI_COMM_WORLD_SIZE is not set"),
    ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x", "PMIX_SERVER_URI2": "x"}, "PMIX_RANK=0.*how many ranks"),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "contradict each other: this is rank 2 of 2"),
    ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK='x' is not a number"),
]


def test_half_of_the_variables_is_no_job_of_one_rank():
    for said, (env, message) in zip(starts(*(env for env, _ in HALVES)), HALVES, strict=True):
        assert re.search(message, said), (env, said)


def test_a_job_of_one_rank():
    cases = [
        {"LOCAL_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    ]
    assert starts(*cases) == ["size 1"] * len(cases)


# ---- Real ones

REAL = {
    "mpirun": ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-np", "2"],
    "mpiexec.hydra": ["mpiexec.hydra", "-np", "2"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_a_real_mpirun(name, tmp_path: Path):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    done = harness.run_command([*REAL[name], *PLAIN], env=harness.clean_env(), cwd=tmp_path, within=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 2, local ({r}, 2): 3.0" for r in range(2)]
