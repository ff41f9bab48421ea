# SPDX-License-Identifier: Apache-2.0
"""The device is there, and verbs that are not ours move data over it: if these fail, look at the machine first."""

import json
import subprocess
from pathlib import Path

import fabric
import harness
import pytest
from bodies.doctor import doctor, two_doctors_sum_together
from levels import cases

HERE = Path(__file__).parent


def peer(*args: str) -> dict[str, object]:
    """Runs pyverbs_peer.py under the Python that has pyverbs; returns what it found."""
    if subprocess.run([fabric.SYSTEM_PYTHON, "-c", "import pyverbs"], capture_output=True, check=False).returncode != 0:
        assert not fabric.IN_VM, "the VM needs python3-pyverbs"
        pytest.skip("python3-pyverbs is not installed")
    return dict(json.loads(fabric.command(fabric.SYSTEM_PYTHON, str(HERE / "pyverbs_peer.py"), *args)))


def test_the_device_is_up_and_has_an_address():
    port = next(link for link in fabric.rdma("link", "show") if link["ifname"] == fabric.HCA)
    assert port["state"] == "ACTIVE"
    assert port["physical_state"] == "LINK_UP"
    assert fabric.addresses(4) or fabric.addresses(6)


@pytest.mark.vm
def test_the_vm_has_ipv4_and_ipv6():
    assert fabric.addresses(4) == ["10.98.0.1"]
    assert fabric.addresses(6) == ["fd98::1"]


def test_pyverbs_sees_the_device():
    found = peer("query", fabric.HCA)
    assert found["name"] == fabric.HCA
    assert found["max_qp_wr"] >= 128
    assert found["max_srq"] > 0
    # Two parts of a push, the header and the payload, go out in one request.
    assert found["max_sge"] >= 2


@pytest.mark.parametrize("size", [0, 1, 64, 4096, 4097, 1 << 20])
def test_a_write_with_immediate_arrives_whole_and_once(size):
    found = peer("write", fabric.HCA, str(size))
    # Everything that bps_rdma's data plane builds on: the immediate comes with the receive's completion, whose bytes
    # are those of the write; memory around it stays as it was; the sender hears of it once.
    assert found == {
        "receive_opcode": "RECV_RDMA_WITH_IMM",
        "immediate": 0xABCD1234,
        "bytes": size,
        "payload_equal": True,
        "around_untouched": True,
        "completions": 1,
    }


def test_a_write_with_a_wrong_key_is_refused():
    assert peer("wrong_key", fabric.HCA)["status"] == "Remote access error"


def test_a_write_out_of_bounds_is_refused():
    assert peer("out_of_bounds", fabric.HCA)["status"] == "Remote access error"


def test_the_device_counts_packets():
    if not fabric.hardware_counters():
        pytest.skip(f"{fabric.HCA} has no hw_counters")
    before = fabric.hardware_counters()
    peer("write", fabric.HCA, "4096")
    after = fabric.hardware_counters()
    assert after["sent_pkts"] > before["sent_pkts"]
    assert after["rcvd_pkts"] > before["rcvd_pkts"]


def test_a_process_that_ends_leaves_no_verbs_objects():
    before = fabric.resources()
    peer("write", fabric.HCA, "4096")
    assert fabric.resources() == before


STREAMED = 20 * 60_000  # bytes in either direction


def stream_over(cable):
    """Between two programs of rdma-core, connected by rdma_cm; both compare what they receive.

    The second one ends well only if the first one has sent back what it has compared. That one may wait for minutes for
    the end of the connection, if the cable has lost the packet that tells it.
    """
    near, far = cable.ends
    options = ["-p", "7471", "-C", "20", "-S", "60000", "-T", "v"]
    with subprocess.Popen(["rstream", "-b", far.address, *options]) as server:
        try:
            harness.eventually(listens, what="a listener of the first program", hopeless=lambda: ended(server))
            fabric.command("rstream", "-b", near.address, "-s", far.address, *options)
            assert server.poll() in (None, 0)
        finally:
            server.kill()


def listens():
    return any(one.get("src-addr", "").endswith(":7471") for one in fabric.rdma("resource", "show", "cm_id"))


def ended(server):
    return "" if server.poll() is None else f"it ended with status {server.returncode}"


@pytest.mark.vm
@pytest.mark.parametrize("netem", cases([("delay", "5ms", "loss", "1%")], [((),)]))
def test_two_devices_talk_over_a_cable_that_may_lose_packets(cable, netem):
    before = cable.packets()
    cable.disturb(*netem)
    stream_over(cable)
    # In packets of 4 KiB.
    assert all(after - b >= STREAMED // 4096 for after, b in zip(cable.packets(), before, strict=True))
    while netem and cable.dropped() == 0:
        stream_over(cable)  # until one of its packets is lost


@pytest.mark.parametrize(
    ("rule", "state", "fact"),
    [("watched", "ok", "used directly"), ("staged", "ok", "copied"), ("trusted", "note", "wrong sums")],
)
def test_the_doctor_says_whose_memory_it_uses(rule, state, fact):
    _, checks = doctor(env={"BPS_RDMA_HCA": f"={fabric.HCA}", "BPS_RDMA_MEMORY": rule})
    found = checks["memory of tensors"]
    assert found["state"] == state
    assert fact in found["fact"]


@pytest.mark.long
def test_two_doctors_sum_over_it():
    two_doctors_sum_together("rdma", BPS_RDMA_HCA=f"={fabric.HCA}")
