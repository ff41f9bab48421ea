# SPDX-License-Identifier: Apache-2.0
"""Who meets whom: the ranks of one job however they are told of it, those of two jobs never; and what is said then."""

import contextlib
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

CODE = """
import os, sys
import numpy as np, bps_rdma as bps
try:
    bps.init()
except bps.BpsError as error:
    os.write(1, f"{type(error).__name__}: {error.message} | {error.hint}\\n".encode())
    sys.exit(3)
os.write(1, f"rank {bps.rank()} has joined\\n".encode())
total = bps.push_pull(np.float32([1]), average=False, name="x")[0]
os.write(1, f"sum {total:.0f}\\n".encode())
bps.shutdown()
"""


class Ranks(harness.Members):
    """Ranks that are started by hand, each with arguments and variables of its own."""

    def __init__(self, folder: Path, program: str = "train.py") -> None:
        super().__init__(folder)
        self.script = folder / program
        self.script.write_text(textwrap.dedent(CODE))
        self.port = harness.free_port()

    def start_rank(self, member: str, rank: int, *arguments: str, size: int = 2, **env: str) -> None:
        told = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        self.command(member, [sys.executable, str(self.script), *arguments], harness.clean_env(**told | env))

    def await_line(self, member: str, text: str) -> str:
        return self.eventually(
            lambda: next((line for line in self.log(member).splitlines() if text in line), ""), what=text, of=[member]
        )

    def await_refusal(self, member: str) -> str:
        """What a rank says that cannot join."""
        assert self.wait(member) == 3, self.report()
        return self.log(member).splitlines()[-1]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(tmp_path) as found:
        yield found


# ---- Two jobs


def test_two_jobs_with_one_port_do_not_sum_together(ranks):
    """Rank 0 of one and rank 1 of the other come first."""
    ranks.start_rank("a0", 0, "--lr", "0.1")
    ranks.start_rank("b1", 1, "--lr", "0.2")
    told = ranks.await_refusal("b1")
    assert "started as `train.py --lr 0.2`, but the process with rank 0 as `train.py --lr 0.1`" in told
    assert "MASTER_PORT of its own" in told
    ranks.start_rank("b0", 0, "--lr", "0.2")
    assert f"another process with rank 0 of the job 'MASTER_PORT={ranks.port}' runs on" in ranks.await_refusal("b0")
    ranks.start_rank("a1", 1, "--lr", "0.1")
    ranks.await_line("a0", "sum 2")
    ranks.await_line("a1", "sum 2")
    assert [ranks.wait(member) for member in ("a0", "a1")] == [0, 0]


def test_a_name_says_that_ranks_belong_together(ranks):
    ranks.start_rank("learner", 0, "--learn", BPS_JOB_ID="play")
    ranks.start_rank("actor", 1, "--act", BPS_JOB_ID="play")
    ranks.succeed()


def test_arguments_may_hold_the_numbers_of_a_rank(ranks):
    ranks.start_rank("0", 0, "--rank=0", "cuda:1", "--seed", "7", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    ranks.start_rank("1", 1, "--rank=1", "cuda:0", "--seed", "7", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    ranks.succeed()


def test_two_processes_with_rank_0(ranks):
    ranks.start_rank("0", 0)
    ranks.eventually(lambda: listens(ranks.pid("0")), what="the scheduler of rank 0", of=["0"])
    ranks.start_rank("other", 0)
    assert "another process with rank 0 of the job" in ranks.await_refusal("other")
    ranks.start_rank("1", 1)
    assert [ranks.wait(member) for member in ("0", "1")] == [0, 0]


def listens(pid: int) -> bool:
    """Whether a process listens for TCP connections."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(fd))  # noqa: PTH115
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)


# ---- One job, told in several ways


@pytest.mark.parametrize("several", [{}, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}])
def test_spellings_of_the_address(ranks, several):
    spellings = ["localhost", "127.0.0.1", "0.0.0.0", socket.gethostname(), own_address()]
    for rank, address in enumerate(spellings):
        # Each is the first on its host as far as it can tell; how often torchrun has started them may differ as well.
        env = several | ({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(spellings))} if several else {})
        ranks.start_rank(str(rank), rank, size=5, MASTER_ADDR=address, TORCHELASTIC_RESTART_COUNT=str(rank), **env)
    ranks.succeed()
    assert "sum 5" in ranks.log("4")


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect(("192.0.2.1", 9))
        return str(towards.getsockname()[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_ranks_of_different_users(ranks):
    ranks.start_rank("0", 0, BPS_SECRET="of both, and long enough")
    env = harness.clean_env(
        RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ranks.port),
        BPS_SECRET="of both, and long enough", BPS_SHM_CMA="0", BPS_TRANSPORT="tcp",
    )  # fmt: skip
    code = "import os, sys, numpy, bps_rdma\nsys.argv = ['train.py']\nos.setuid(65534)\n" + textwrap.dedent(CODE)
    ranks.command("1", [sys.executable, "-c", code], env, cwd="/")
    ranks.succeed()


# ---- Another's scheduler, or none


def joins(bps: Any) -> float:
    return float(bps.push_pull(np.float32([1]), average=False, name="x")[0])


def test_a_scheduler_of_another_name_is_said_with_both(tmp_path):
    with Ranks(tmp_path) as ranks:
        roles = harness.of_roles(1, 1, ranks.port) | {"BPS_SECRET": "of both, and long enough"}
        ranks.command("scheduler", [harness.binary("bps-scheduler")], harness.clean_env(**roles, BPS_JOB_ID="theirs"))
        worker = roles | {"DMLC_ROLE": "worker", "BPS_JOB_ID": "mine", "BPS_JOIN_TIMEOUT": "3000"}
        ranks.command("worker", [sys.executable, str(ranks.script)], harness.clean_env(**worker))
        both = f"the scheduler at 127.0.0.1:{ranks.port} belongs to another job, 'theirs', and this process to the job"
        ranks.await_line("worker", f"{both} 'mine'; this process goes on looking")
        assert f"AuthenticationError: {both} 'mine' | set the same BPS_JOB_ID" in ranks.await_refusal("worker")
        stranger = worker | {"BPS_SECRET": "another one, of somebody else"}
        ranks.command("stranger", [sys.executable, str(ranks.script)], harness.clean_env(**stranger))
        assert "theirs" not in ranks.await_refusal("stranger")
        ranks.kill("scheduler", 15)


def test_a_program_that_is_no_scheduler(tmp_path):
    with Ranks(tmp_path) as ranks, socket.create_server(("127.0.0.1", ranks.port)) as server:
        env = harness.of_roles(1, 1, ranks.port) | {"DMLC_ROLE": "worker", "BPS_JOIN_TIMEOUT": "3000"}
        ranks.command("worker", [sys.executable, str(ranks.script)], harness.clean_env(**env))
        server.settimeout(1)
        while ranks.processes["worker"].status is None:
            with contextlib.suppress(TimeoutError), server.accept()[0] as client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                client.recv(100)
        assert "does not speak the protocol of bps_rdma | another program listens" in ranks.await_refusal("worker")


@pytest.mark.parametrize(
    ("env", "said", "hint"),
    [
        ({}, "no scheduler answers at 127.0.0.1, 16 ports", "same MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "cannot resolve 'no-such-host.invalid'", "same MASTER_ADDR and"),
        ({"BPS_ROOT_PORT": "{port}"}, "no scheduler answers at 127.0.0.1:{port}", "same MASTER_ADDR and BPS_ROOT_PORT"),
        (
            {"DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": "{port}", "DMLC_PS_ROOT_URI": "127.0.0.1"},
            "no scheduler answers at 127.0.0.1:{port}",
            "check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT",
        ),
    ],
)
def test_hints_name_the_variables_that_were_set(ranks, env, said, hint):
    secret = {"BPS_SECRET": "long enough for a job", "BPS_JOIN_TIMEOUT": "1"}
    port = harness.free_port()
    ranks.start_rank("1", 1, **secret | {name: value.format(port=port) for name, value in env.items()})
    told = ranks.await_refusal("1")
    assert said.format(port=port) in told
    assert hint in told


def test_a_name_that_leads_nowhere_is_said_at_once(ranks):
    ranks.start_rank("1", 1, MASTER_ADDR="no-such-host.invalid", BPS_SECRET="long enough for a job")
    ranks.await_line("1", "cannot resolve 'no-such-host.invalid': Name or service not known; this process goes on")


def test_a_scheduler_without_members_ends(tmp_path):
    env = harness.of_roles(1, 1, harness.free_port()) | {"BPS_JOIN_TIMEOUT": "1"}
    done = harness.run_command([harness.binary("bps-scheduler")], env=harness.clean_env(**env), within=60)
    assert done.returncode == 1
    assert "no member has come within BPS_JOIN_TIMEOUT" in done.stderr


def test_torchruns_name_is_not_that_of_dedicated_servers(tmp_path):
    env = {"TORCHELASTIC_RUN_ID": "none"}
    assert harness.run(joins, workers=2, servers=1, env={"BPS_JOB_ID": ""}, rank_env=[env, env]) == [2.0, 2.0]


def test_min_workers_under_torchrun_is_warned_of():
    env = harness.clean_env(BPS_MIN_WORKERS="1", TORCHELASTIC_RUN_ID="none", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    done = harness.run_command([sys.executable, "-c", "import bps_rdma as b; b.init(); b.shutdown()"], env=env)
    assert done.returncode == 0, done.stderr
    assert "BPS_MIN_WORKERS=1 does not help under torchrun" in done.stderr
    assert "bps run --min-np" in done.stderr


def comes_or_dies(bps: Any, rank_in: str) -> str:
    if os.environ[rank_in] == "0":
        harness.await_mark("go")
    harness.mark("comes")
    with pytest.raises(bps.DeadlineError) as caught:
        bps.init()
    return str(caught.value)


def test_a_member_that_dies_before_all_have_come_is_named():
    """Another process may still come in its place: so the others wait, as they do for one that has not come."""
    patience = [{"BPS_JOIN_TIMEOUT": "5"}, {"BPS_JOIN_TIMEOUT": "100"}]
    with harness.start(comes_or_dies, "DMLC_WORKER_ID", workers=2, servers=1, init=False, rank_env=patience) as job:

        def has_told(words: str) -> bool:
            job.kill("scheduler", signal.SIGUSR1)  # its answer tells who is missing
            return words in job.log("scheduler")

        job.await_marks("comes", [1])
        job.eventually(lambda: has_told("1 of 2 workers joined; missing rank 0"))
        job.kill("rank 1")
        job.eventually(lambda: has_told("0 of 2 workers joined; missing ranks 0, 1; worker 1 ("))
        job.set_mark("go")
        text = job.values(but=[1])[0]
        lost = f"worker 1 ({socket.gethostname()}, pid {job.pid('rank 1')})"
        assert f"missing rank 1; {lost} had joined and was lost" in text
        assert f"{lost} was lost before all members have come" in job.log("scheduler")
