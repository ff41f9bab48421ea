# SPDX-License-Identifier: Apache-2.0
"""`bps doctor`: what it says of this machine, and a verified transfer between two of them."""

import re
import shlex
import subprocess
from pathlib import Path

import gpu_arrays
import harness
import numpy as np
import pytest
from bodies.doctor import DOCTOR, ENV, doctor, two_doctors_sum_together

from bps_rdma.tools import gpus
from bps_rdma.tools.doctor import Findings, look_at_gpus


def test_a_machine_that_needs_nothing_more_is_healthy():
    status, checks = doctor(env={"BPS_TRANSPORT": "tcp"})
    assert status == 0
    assert {"system", "locked memory", "shared memory", "verbs libraries"} <= checks.keys()
    assert all(check["hint"] for check in checks.values() if check["state"] != "ok")


def test_what_is_said_of_shared_memory_is_so(alone):
    """Anonymous memory, of which as much is free as a job can have; no file of it is in /dev/shm."""
    before = harness.shared_memory_files()
    array = alone.empty(1 << 20, np.uint8)
    array[:] = 1
    mapped = Path("/proc/self/maps").read_text()
    assert "/memfd:bps" in mapped
    assert "/dev/shm" not in mapped
    assert harness.shared_memory_files() <= before
    said = doctor(env={"BPS_TRANSPORT": "tcp"})[1]["shared memory"]
    assert said["state"] == "ok"
    free = re.fullmatch(r"anonymous \(memfd\), of which (\d+) MiB are free; /dev/shm is not used", said["fact"])
    assert free, said
    total = int(re.search(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[1]) >> 10
    assert 0 < int(free[1]) <= total


def test_what_is_in_the_way_of_the_settings_is_bad_and_has_a_remedy():
    status, checks = doctor(env={"BPS_TRANSPORT": "rdma", "BPS_RDMA_HCA": "=nosuch9"})
    assert status == 1
    bad = [check for check in checks.values() if check["state"] == "bad"]
    assert bad
    assert all(check["hint"] for check in bad)


def test_a_setting_that_cannot_be_read_is_named():
    done = harness.run_command([*DOCTOR, "--json"], env=ENV | {"BPS_RDMA_TIMEOUT": "99"})
    assert done.returncode == 2
    assert "BPS_RDMA_TIMEOUT='99' is not a whole number from 1 to 31" in done.stderr


@pytest.mark.long_over("shm")  # doctors look at two hosts
def test_two_doctors_sum_together(transport):
    two_doctors_sum_together(transport)


def test_without_a_default_route_the_command_names_an_address_that_leads_to_other_hosts():
    unshare = ["unshare", "--map-root-user", "--net"]
    cards = "ip link set lo up && ip link add card0 type veth peer name card1 && ip link set card0 up"
    network = f"{cards} && ip address add 10.97.1.1/24 dev card0 && exec"
    if subprocess.run([*unshare, "sh", "-c", f"{network} true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no network namespace with a card of its own can be made here")
    done = harness.run_command(
        [*unshare, "sh", "-c", f'{network} "$@"', "sh", *DOCTOR, "--no-transfer", "--serve", "--wait", "1"], env=ENV
    )
    assert "bps doctor --peer 10.97.1.1:" in done.stderr


def test_a_peer_that_is_not_there():
    options = ["--peer", f"127.0.0.1:{harness.free_port()}", "--code", "abcd", "--timeout", "2"]
    status, checks = doctor(*options, env={"BPS_TRANSPORT": "tcp"})
    assert status == 1
    assert checks["peer"]["state"] == "bad"
    assert "bps doctor --serve" in checks["peer"]["hint"]
    assert "scheduler" not in checks["peer"]["fact"] + checks["peer"]["hint"]


@pytest.mark.parametrize("options", [["--peer", "somewhere"], ["--peer", "127.0.0.1:9", "--no-transfer"]])
def test_a_peer_without_a_port_or_a_code_is_an_error_of_the_command_line(options):
    done = harness.run_command([*DOCTOR, *options], env=ENV)
    assert done.returncode == 2, done.stdout
    assert "needs the form HOST:PORT, and --code" in done.stderr
    assert "bps doctor --serve" in done.stderr


def test_a_wrong_code_is_refused():
    with subprocess.Popen(
        [*DOCTOR, "--no-transfer", "--serve", "--wait", "1000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV | {"BPS_TRANSPORT": "tcp"}, cwd="/",
    ) as first:  # fmt: skip
        try:
            assert first.stderr is not None
            first.stderr.readline()
            where = shlex.split(first.stderr.readline())[3]
            status, checks = doctor("--peer", where, "--code", "0000", "--timeout", "60", env={"BPS_TRANSPORT": "tcp"})
            assert status == 1
            assert "secret" in checks["peer"]["fact"]
            assert "--code" in checks["peer"]["hint"]
            assert first.poll() is None, "it waits for one with the right code"
        finally:
            first.terminate()


# ---- GPUs


def with_gpus(count: int, **more: str) -> dict[str, str]:
    return {"BPS_TRANSPORT": "tcp", "BPS_CUDA_LIB": gpu_arrays.driver(), "FAKE_CUDA_GPUS": str(count)} | more


def test_each_gpu_is_named_and_how_its_tensors_travel():
    status, checks = doctor(env=with_gpus(8))
    assert status == 0
    assert checks["GPUs"]["fact"] == "8, driver CUDA 12.4"
    assert checks["GPU 7"]["fact"].startswith("Fake, 80 GiB, PCI 0000:8a:00.0; ")
    assert checks["GPU to GPU"]["fact"].startswith("28 of 28 pairs reach each other's memory, 6 with atomics")
    assert checks["GPUDirect"]["fact"].startswith("dma-buf on 7 of 8 GPUs, nvidia_peermem is not loaded; ")
    assert "threads of Python (BPS_DEVICE_ROUTE=0)" in checks["CUDA tensors"]["fact"]
    _, checks = doctor(env=with_gpus(1, BPS_DEVICE_ROUTE="1"))
    assert "the core (BPS_DEVICE_ROUTE=1)" in checks["CUDA tensors"]["fact"]
    assert checks["GPUDirect"]["fact"].endswith("; not used without BPS_DEVICE_ROUTE=1 and BPS_GPUDIRECT=1")
    _, checks = doctor(env=with_gpus(1, BPS_DEVICE_ROUTE="1", BPS_GPUDIRECT="1"))
    assert checks["GPUDirect"]["fact"].endswith("; used to reach servers by RDMA")
    assert "GPU to GPU" not in checks


@pytest.mark.parametrize(
    ("env", "fact", "hint"),
    [
        ({"BPS_CUDA_LIB": "nosuch.so"}, "CUDA's driver cannot be opened: nosuch.so", "docker run --gpus all"),
        (with_gpus(8, FAKE_CUDA_INIT="802"), "an error of the fake (CUDA error 802)", "nvidia-fabricmanager"),
        (with_gpus(8, FAKE_CUDA_INIT="999"), "an error of the fake (CUDA error 999)", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_work_is_bad_where_the_settings_ask_for_it(env, fact, hint):
    status, checks = doctor(env={"BPS_TRANSPORT": "tcp", "BPS_DEVICE_ROUTE": "1"} | env)
    assert (status, checks["GPUs"]["state"]) == (1, "bad")
    assert fact in checks["GPUs"]["fact"]
    assert hint in checks["GPUs"]["hint"]
    status, checks = doctor(env={"BPS_TRANSPORT": "tcp"} | env)
    assert (status, checks["GPUs"]["state"]) in ((0, "ok"), (0, "note")), "with GPUs on the bus it is a note"


class Machine:
    """What the kernel shows of the devices of a machine."""

    def __init__(self, sysfs: Path) -> None:
        self.sysfs = sysfs

    def add(self, way: str, node: int, nic: str = "", **files: str) -> None:
        """Adds a device, behind these bridges."""
        place = self.sysfs / "devices" / way
        place.mkdir(parents=True)
        for file, text in ({"numa_node": str(node)} | files).items():
            (place / file).write_text(f"{text}\n")
        link = self.sysfs / "bus/pci/devices" / place.name
        if nic:
            link = self.sysfs / "class/infiniband" / nic / "device"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place)


GPU = {"vendor": "0x10de", "class": "0x030200"}
NIC = {"vendor": "0x15b3", "class": "0x020700"}


def test_the_nics_near_a_gpu_are_those_that_share_most_bridges_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_GPUS", "5")
    machine = Machine(tmp_path)
    machine.add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:1a:00.0", 0, **GPU)
    machine.add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:04.0/0000:1c:00.0", 0, "mlx5_0", **NIC)
    machine.add("pci0000:16/0000:16:02.0/0000:2a:00.0", 0, **GPU)
    machine.add("pci0000:16/0000:16:03.0/0000:2c:00.0", 0, "mlx5_3", **NIC)
    machine.add("pci0000:38/0000:38:01.0/0000:3a:00.0", 1, **GPU)
    machine.add("pci0000:40/0000:40:01.0/0000:41:00.0", 1, "mlx5_1", **NIC)
    machine.add("pci0000:40/0000:40:01.0/0000:42:00.0", 1, "mlx5_2", **NIC)
    machine.add("pci0000:48/0000:48:01.0/0000:4a:00.0", -1, **GPU)
    (tmp_path / "class/infiniband/rxe0").mkdir()  # has no device
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    (tmp_path / "module/nvidia").mkdir()
    (tmp_path / "module/nvidia/version").write_text("550.54.15\n")
    found = gpus.look(gpu_arrays.driver(), tmp_path)
    assert [(gpu.nics, gpu.near, gpu.node) for gpu in found.found] == [
        (["mlx5_0"], "switch", 0),
        (["mlx5_0", "mlx5_3"], "root", 0),
        (["mlx5_1", "mlx5_2"], "node", 1),
        ([], "", -1),
        ([], "", -1),  # the kernel does not show it
    ]
    assert (found.on_bus, found.has_peermem, found.kernel_driver) == (4, True, "550.54.15")


def test_all_nics_are_shown_by_distance_and_who_uses_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_GPUS", "2")
    machine = Machine(tmp_path)
    machine.add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:1a:00.0", 0, **GPU)
    machine.add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:04.0/0000:1c:00.0", 0, "mlx5_3", **NIC)
    machine.add("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:04.0/0000:1c:00.1", 0, "mlx5_2", **NIC)
    machine.add("pci0000:16/0000:16:01.0/0000:1e:00.0", 0, "mlx5_5", **NIC)
    machine.add("pci0000:16/0000:16:03.0/0000:2c:00.0", 0, "mlx5_4", **NIC)
    machine.add("pci0000:30/0000:30:01.0/0000:31:00.0", 0, "mlx5_1", **NIC)
    machine.add("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "mlx5_0", **NIC)
    report = Findings()
    report.rdma = {"devices": [{"name": f"mlx5_{number}"} for number in range(6)]}
    report.gpus = gpus.look(gpu_arrays.driver(), tmp_path)
    for near_gpu, state in (("", "note"), ("auto", "ok")):
        report.checks.clear()
        look_at_gpus(report, by_core=True, near_gpu=near_gpu)
        checks = {check.name: check for check in report.checks}
        assert checks["GPU 0"].fact.endswith(
            "; behind the same PCIe switch: mlx5_2, mlx5_3, then mlx5_5; at the same PCIe root: mlx5_4; "
            "at the same NUMA node: mlx5_1; farther: mlx5_0"
        )
        assert checks["GPU 1"].fact.endswith("; no NIC is near")
        chosen = checks["NICs of GPUs"]
        assert chosen.state == state
        assert "GPU 0: BPS_RDMA_HCA==mlx5_2,mlx5_3" in chosen.fact
        assert "GPU 1" not in chosen.fact
        assert ("BPS_RDMA_NEAR_GPU=auto" in chosen.hint) == (state == "note")


def test_without_a_driver_gpus_on_the_bus_are_a_note(tmp_path):
    Machine(tmp_path).add("pci0000:16/0000:16:01.0/0000:1a:00.0", 0, **GPU)
    report = Findings()
    report.gpus = gpus.look("nosuch.so", tmp_path)
    look_at_gpus(report, by_core=False)
    (check,) = report.checks
    assert (check.state, check.fact[:28]) == ("note", "1 of NVIDIA on the PCI bus; ")
    assert "docker run --gpus all" in check.hint
