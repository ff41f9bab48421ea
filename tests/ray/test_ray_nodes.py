# SPDX-License-Identifier: Apache-2.0
"""Nodes that are lost, and `ray stop`: the others know within seconds, and the job goes on."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import harness
import pytest
import ray_jobs

import bps_rdma.ray

KNOWN_S = 3 * harness.PATIENCE  # until all others know
ASKED_S = 2.0  # of a node that does not answer: bps_rdma/ray/nodes.py


def test_a_job_survives_the_loss_of_a_node(two_nodes, tmp_path, caplog):
    wanted = ray_jobs.undisturbed(tmp_path / "undisturbed", ranks=3)
    third = two_nodes.add_node(num_cpus=4, object_store_memory=80_000_000)
    two_nodes.wait_for_nodes()
    with removed_when_it_hangs(two_nodes, lambda: third, tmp_path):
        # The rank on the first node waits in the call where the others lose their peer.
        found = bps_rdma.ray.run(
            ray_jobs.meets_an_end, ray_jobs.plan(tmp_path, "hang", rank=2), hosts=3, max_failures=1
        )
    assert found == [wanted] * 3
    others_knew_and_went_on(tmp_path, caplog)


@contextlib.contextmanager
def removed_when_it_hangs(cluster, which, folder: Path):
    """Ends the raylet of the node that which() names, and so the node, when a rank has come to where it hangs."""

    def remove() -> None:
        harness.eventually((folder / "happened").exists, 120)
        node = which()
        (raylet,) = node.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)
        ray_jobs.note(folder / "removed")
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=remove)
    thread.start()
    yield
    thread.join()


def others_knew_and_went_on(folder: Path, caplog) -> None:
    """The driver knew, and the ranks unless the driver was faster and killed them; the next start went on."""
    begun = ray_jobs.noted(folder / "removed")
    (warning,) = [record for record in caplog.records if record.getMessage().startswith("attempt 1 of 2 failed")]
    knew = [ray_jobs.noted(file) - begun for file in folder.glob("knew-0-*")]
    went_on = [ray_jobs.noted(file) - begun for file in folder.glob("went-on-*")]
    print(f"after {warning.created - begun} s {warning.getMessage()}; ranks knew after {knew}, went on after {went_on}")
    assert max(knew, default=0) < KNOWN_S
    assert warning.created - begun < KNOWN_S + ASKED_S  # it knew, and has found out which nodes answer
    assert went_on
    assert max(went_on) < 30 * harness.PATIENCE


@pytest.mark.long
@pytest.mark.parametrize("role", ["bps-server", "bps-scheduler"])
def test_a_job_survives_the_loss_of_a_node_with_its_servers(two_nodes, tmp_path, caplog, role):
    """The scheduler runs beside server 0; server 1 is alone on its node."""
    wanted = ray_jobs.undisturbed(tmp_path / "undisturbed")
    small = {"num_cpus": 0, "object_store_memory": 80_000_000, "resources": {"serves": 1}}  # no room for ranks
    nodes = [two_nodes.add_node(**small) for _ in range(3)]
    two_nodes.wait_for_nodes()

    def with_the_role():
        (scheduler,) = [pid for pid, text in ray_jobs.processes().items() if "bps-scheduler" in text.split(" ")[0]]
        servers = [pid for pid, text in ray_jobs.processes().items() if "bps-server" in text.split(" ")[0]]
        beside = raylet_of(scheduler)
        (alone,) = [raylet for raylet in map(raylet_of, servers) if raylet != beside]
        wanted = beside if role == "bps-scheduler" else alone
        return next(node for node in nodes if node.all_processes["raylet"][0].process.pid == wanted)

    try:
        with removed_when_it_hangs(two_nodes, with_the_role, tmp_path):
            found = bps_rdma.ray.run(
                ray_jobs.meets_an_end, ray_jobs.plan(tmp_path, "hang"), hosts=2, servers=2, max_failures=1,
                server_resources={"serves": 1},
            )  # fmt: skip
        assert found == [wanted, wanted]
        others_knew_and_went_on(tmp_path, caplog)
    finally:
        for node in nodes:
            if node in two_nodes.worker_nodes:
                two_nodes.remove_node(node, allow_graceful=False)


def raylet_of(pid: int) -> int:
    """The raylet above the actor that has started this process."""
    return parent(parent(pid))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
@pytest.mark.parametrize("force", [[], ["--force"]], ids=str)
def test_ray_stop(force):
    """In a process namespace of its own: `ray stop` ends every Ray process that it sees."""
    alone = ["unshare", "--fork", "--pid", "--mount-proc"]
    if harness.run_command([*alone, "true"]).returncode:
        pytest.skip("this process may not make a process namespace")
    script = str(Path(__file__).with_name("ray_stop.py"))
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:  # a short name: Ray makes sockets in it
        env = os.environ | {"RAY_TMPDIR": folder, "PYTHONPATH": str(Path(harness.__file__).parents[1])}
        # In a checkout actors would find the package without its native part.
        done = harness.run_command([*alone, sys.executable, "-P", script, folder, *force], env, folder, within=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["left"] == []
    assert found["knew"] - found["begun"] < KNOWN_S
    assert found["gone"] - found["begun"] < KNOWN_S
