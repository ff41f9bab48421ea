# SPDX-License-Identifier: Apache-2.0
"""Ranks that srun starts: what Slurm's variables mean, where the secret is, and what goes wrong.

tests/slurm has the same on a real cluster.
"""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import harness
import pytest

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.launch import cluster, key_file, slurm
from bps_rdma.launch.environment import inside_a_job

# What srun of Slurm 22.05 and 24.11 sets for the third of five tasks on two nodes.
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_DISTRIBUTION": "block",
}
BPS = [sys.executable, "-c", "from bps_rdma.cli import main; main()"]
# The output of ranks that write at the same time may mix; lines of one write do not.
RANK = """
import os, bps_rdma, numpy
bps_rdma.init()
mean = bps_rdma.push_pull(numpy.float32([bps_rdma.rank()]), name="x")[0]
os.write(1, f"rank {bps_rdma.rank()} of {bps_rdma.size()}: {mean}\\n".encode())
bps_rdma.shutdown()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def adopted(*, arguments: dict[str, object] | None = None, **env: str | None) -> dict[str, str]:
    """What adopt() adds for TASK, changed by `env` (None: the variable is missing)."""
    merged = TASK | env
    before = {name: value for name, value in merged.items() if value is not None}
    after = dict(before)
    cluster.adopt(after, arguments or {})
    return {name: value for name, value in after.items() if before.get(name) != value}


def task(index: int, tasks: int, **env: str) -> dict[str, str]:
    """The environment of a task of a step whose tasks are all on this machine."""
    ours = {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
    }
    here = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index), "SLURM_NODEID": "0"}
    # A job of its own, so that no other test takes its ports.
    return harness.clean_env(**TASK | ours | here | {"SLURM_JOB_ID": str(os.getpid())} | env)


def test_a_task_is_a_rank(home):
    assert adopted() == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20000 + (4711 * 16 + 3) % 12768),
        "BPS_JOB_ID": "slurm-4711.3-0",
        "BPS_SECRET_FILE": str(home / ".config/bps_rdma/secret"),
    }


def test_a_requeued_job_is_another_one(home):
    assert adopted(SLURM_RESTART_COUNT="2")["BPS_JOB_ID"] == "slurm-4711.3-2"


def test_what_the_user_has_set_stays(home):
    mine = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "BPS_JOB_ID": "mine", "BPS_SECRET": "0123456789abcdef"}
    found = adopted(**mine)
    assert set(found) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    assert not (home / ".config").exists()


def test_a_job_that_asks_for_no_secret_gets_none(home):
    assert "BPS_SECRET_FILE" not in adopted(BPS_INSECURE="1")
    assert "BPS_SECRET_FILE" in adopted(BPS_INSECURE="0")


def test_on_one_host_the_host_has_the_secret(home):
    found = adopted(SLURM_STEP_TASKS_PER_NODE="5", SLURM_NODEID="0")
    assert found["LOCAL_WORLD_SIZE"] == "5"
    assert "BPS_SECRET_FILE" not in found
    assert not (home / ".config").exists()


def test_torchrun_says_the_rank_and_slurm_the_rest(home):
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"}
    assert adopted(**torchrun) == {
        "BPS_JOB_ID": "slurm-4711.3-0",
        "BPS_SECRET_FILE": str(home / ".config/bps_rdma/secret"),
    }
    assert adopted(**torchrun | {"WORLD_SIZE": "8"}) == {}  # a job of this host alone


def test_ranks_that_are_arguments_stay_and_get_the_secret(home):
    found = adopted(arguments={"rank": 1, "world_size": 2})
    assert set(found) == {"BPS_JOB_ID", "BPS_SECRET_FILE"}


@pytest.mark.parametrize("step", [None, "4294967291"])  # the second is how some versions say the same
def test_a_batch_script_is_one_rank_and_is_warned(step, home):
    with pytest.warns(RuntimeWarning, match="this Slurm job has 5 tasks, but this process was not started by srun"):
        assert adopted(SLURM_STEP_ID=step, SLURM_NTASKS="5") == {}


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_STEP_ID": None},  # a batch script with one task
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},
        {"DMLC_ROLE": "worker", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RAY_RAYLET_PID": "77"},  # an actor: the task is its raylet
        {"RAY_RAYLET_PID": "77", "SLURM_STEP_ID": None, "SLURM_NTASKS": "5"},
        # Each raylet may be a step of its own: nothing of Slurm's stands for what its actors are together.
        {"RAY_RAYLET_PID": "77", "RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
    ],
)
def test_what_is_no_rank_of_slurm(env, home, monkeypatch):
    assert adopted(**env) == {}
    assert not cluster.is_rank({k: v for k, v in (TASK | env).items() if v is not None})


def test_commands_see_that_they_are_ranks(monkeypatch):
    assert not inside_a_job()
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    assert inside_a_job()


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"])
def test_a_missing_variable_is_named(name):
    with pytest.raises(InvalidArgumentError, match=f"SLURM_STEP_ID=3.*but {name} is not set"):
        adopted(**{name: None})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a number"),
        ({"SLURM_PROCID": "5"}, "contradict each other: task 5 of SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,3"}, "contradict each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3;2"}, "not a list of tasks per node"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "5"}, "another launcher started this process"),
    ],
)
def test_variables_that_cannot_be_used(env, message, home):
    with pytest.raises(InvalidArgumentError, match=message):
        adopted(**env)


def test_a_rank_of_mpirun_inside_a_step(home):
    """Open MPI starts its daemons by srun: what Slurm says is of the daemon."""
    mpirun = {"RANK": "1", "SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}
    told = {f"OMPI_COMM_WORLD_{name}": value for name, value in mpirun.items()}
    found = adopted(**told, PMIX_NAMESPACE="123", MASTER_ADDR="gpu07")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "16", "1")
    assert found["BPS_JOB_ID"] == "ompi-123"  # the ranks beside the batch script are in no step


def test_ranks_of_srun_with_pmi(home):
    assert adopted(PMI_RANK="3", PMI_SIZE="5")["RANK"] == "3"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-08]", "gpu07"),
        ("gpu[3,5-9],login", "gpu3"),
        ("login,gpu[3,5-9]", "login"),
        ("rack[1-2]n[03-05,09],x[1-2]", "rack1n03"),
        ("a[01-02]-ib.cluster", "a01-ib.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert slurm.first_host(nodes) == first


def test_tasks_of_nodes():
    assert slurm.tasks_of_nodes("2(x3),1") == (2, 2, 2, 1)


def test_concurrent_steps_have_ports_of_their_own(home):
    steps = [("100", str(step)) for step in range(16)] + [("101", "0"), ("101", "1")]
    ports = {adopted(SLURM_JOB_ID=job, SLURM_STEP_ID=step)["MASTER_PORT"] for job, step in steps}
    assert len(ports) == len(steps)
    assert all(20000 <= int(port) < 32768 for port in ports)


# ---- The secret


def test_the_key_file_is_made_once_and_private(home):
    path = key_file.shared_key_file()
    text = path.read_text()
    assert len(text.strip()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert key_file.shared_key_file().read_text() == text
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_all_who_come_at_once_get_one_key(home):
    code = "from bps_rdma.launch.key_file import shared_key_file as f; print(f().read_text().strip())"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/") for _ in range(8)
    ]
    keys = [rank.communicate(timeout=60 * harness.PATIENCE)[0] for rank in ranks]
    assert len(set(keys)) == 1
    assert len(keys[0].strip()) == 64


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda key: key.chmod(0o640), "its mode is 0640"),
        (lambda key: key.parent.chmod(0o755), "its mode is 0755"),
        (lambda key: (key.rename(key.with_name("x")), key.symlink_to("x")), "is a link"),
    ],
)
def test_a_key_file_that_is_not_safe_is_refused(home, damage, message):
    damage(key_file.shared_key_file())
    with pytest.raises(InvalidArgumentError, match=message):
        key_file.shared_key_file()


def test_a_home_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(InvalidArgumentError, match=r"cannot be kept in the home directory.*BPS_SECRET_FILE"):
        key_file.shared_key_file()


# ---- Heterogeneous jobs

COMPONENTS = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "dpu[3-4]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "4(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
}


def test_the_variables_of_all_components(home):
    assert slurm.component_variables(COMPONENTS) == {
        "BPS_JOB_ID": "slurm-4711-0",
        "BPS_ROOT_URI": "dpu3",
        "BPS_ROOT_PORT": str(12000 + 4711),
        "BPS_NUM_WORKERS": "8",
        "BPS_NUM_SERVERS": "2",
        "BPS_SECRET_FILE": str(home / ".config/bps_rdma/secret"),
    }
    assert slurm.component_variables(COMPONENTS, 8)["BPS_NUM_WORKERS"] == "64"


def test_a_job_without_components():
    with pytest.raises(InvalidArgumentError, match=r"SLURM_JOB_NODELIST_HET_GROUP_1 is not set.*hetjob"):
        slurm.component_variables({"SLURM_JOB_ID": "1"})


# ---- Processes


def test_plain_python_under_srun():
    lines = harness.lines_of([([sys.executable, "-c", RANK], task(index, 2)) for index in range(2)])
    assert lines == ["rank 0 of 2: 0.5", "rank 1 of 2: 0.5"]


def test_bps_run_in_every_task():
    run = [*BPS, "run", "-np", "2", sys.executable, "-c", RANK]
    lines = harness.lines_of([(run, task(index, 2, SLURM_STEP_ID="4")) for index in range(2)])
    assert lines == [f"rank {rank} of 4: 1.5" for rank in range(4)]


def test_bps_run_on_hosts_that_are_named():
    common = harness.clean_env(BPS_SECRET="0123456789abcdef", BPS_JOB_ID=f"pods-{os.getpid()}", MASTER_ADDR="127.0.0.1")
    run = [*BPS, "run", "--nnodes", "2", "-np", "2", sys.executable, "-c", RANK]
    lines = harness.lines_of([(run, common | {"JOB_COMPLETION_INDEX": str(pod)}) for pod in range(2)])
    assert lines == [f"rank {rank} of 4: 1.5" for rank in range(4)]


def test_a_pod_that_is_a_job_by_itself_says_so():
    run = harness.run_command([*BPS, "run", "-np", "2", "true"], env=harness.clean_env(JOB_COMPLETION_INDEX="1"))
    assert run.returncode == 0
    assert "without --nnodes it is a job by itself" in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--nproc is missing"),
        (["-np", "2", "--node-rank", "1"], "add --nnodes"),
        (["-np", "2", "--nnodes", "2"], "--node-rank is missing"),
        (["-np", "2", "--nnodes", "2", "--node-rank", "2"], "not in 0..1"),
        (["-np", "2", "--nnodes", "2", "--node-rank", "1"], "--master-addr is missing"),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "h"], "--nproc is missing"),
        (["-np", "2", "--servers", "1", "--nnodes", "2"], "docs/slurm.md"),
    ],
)
def test_options_that_are_missing(call, options, message):
    status, _, error = call("run", *options, "true")
    assert status == 2
    assert message in error


def test_the_signal_that_warns_of_the_end_reaches_the_ranks():
    code = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b"warned\\n"), sys.exit(0)))
os.write(1, b"ready\\n")
while True: signal.pause()
"""
    run = subprocess.Popen(
        [*BPS, "run", "-np", "2", sys.executable, "-c", code], env=harness.clean_env(), cwd="/", stdout=subprocess.PIPE
    )
    assert run.stdout is not None
    for _ in range(2):
        assert run.stdout.readline() == b"ready\n"
    run.send_signal(signal.SIGUSR1)
    assert run.communicate(timeout=60 * harness.PATIENCE)[0] == b"warned\nwarned\n"
    assert run.returncode == 0
