# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told: over HTTP by every role, and by a collector of prometheus_client."""

import contextlib
import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.metrics import fetch, samples, value
from harness import await_mark, mark
from harness.freeze import frozen, thread_of
from prometheus_client.parser import text_string_to_metric_families

COUNT = 1 << 18  # float32: 1 MiB
ROUNDS = 5


def pushes(bps: Any) -> dict[str, int]:
    array = np.ones(COUNT, np.float32)
    for _ in range(ROUNDS):
        bps.push_pull_inplace(array, name="x")
    bps.barrier()
    mark("pushed")
    await_mark("looked")
    return dict(bps.metrics()["total"])


def one_is_late(bps: Any) -> None:
    if bps.rank() == 1:
        await_mark("looked")
    bps.push_pull(np.ones(8, np.float32), name="x")


def test_the_age_of_the_oldest_round_grows():
    port = harness.free_ports(2)
    with harness.start(one_is_late, env={"BPS_METRICS_PORT": str(port)}) as job:

        def age() -> float:
            """On the rank whose server has the round."""
            ages = [0.0]
            for rank in range(2):
                with contextlib.suppress(OSError):  # it has not begun to listen
                    ages.append(value(samples(fetch(port + rank)[2]), "bps_oldest_round_age_seconds"))
            return max(ages)

        first = job.eventually(age, 30, "an open round")
        job.eventually(lambda: age() > first + 0.25, 30, "a greater age")
        job.set_mark("looked")
        job.results()


@pytest.fixture(scope="module")
def embedded() -> tuple[list[str], list[dict[str, int]]]:
    """What two ranks serve after five rounds, and what metrics() returns to them then."""
    port = harness.free_ports(2)
    with harness.start(pushes, env={"BPS_METRICS_PORT": str(port), "BPS_TRANSPORT": "tcp"}) as job:
        job.await_marks("pushed")
        # A server has the end of its last writes a moment after the other rank has their bytes.
        texts = [job.eventually(lambda rank=rank: fetch(port + rank)[2], until=has_no_round) for rank in range(2)]
        job.set_mark("looked")
        return texts, job.results()


def has_no_round(text: str) -> bool:
    return value(samples(text), "bps_open_rounds") == 0


def test_each_rank_serves_at_the_port_plus_its_local_rank(embedded):
    for rank, text in enumerate(embedded[0]):
        assert value(samples(text), "bps_info", role="joint", rank=str(rank)) == 1


def test_counters_are_those_of_metrics(embedded):
    for text, counted in zip(*embedded, strict=True):
        found = samples(text)
        assert value(found, "bps_operations_total", result="complete") == counted["operations"] == ROUNDS
        assert value(found, "bps_partitions_total") == counted["partitions"]
        assert value(found, "bps_messages_sent_total", plane="data") == counted["data_writes"]
        assert value(found, "bps_sent_bytes_total", plane="data") == counted["data_bytes"] > 0
        assert value(found, "bps_slot_memory_bytes") == counted["slot_bytes"] > 0
        assert counted["silent_loops"] == 0


def test_times_of_operations(embedded):
    for text in embedded[0]:
        found = samples(text)
        counts = [one.value for one in found if one.name == "bps_operation_duration_seconds_bucket"]
        assert counts == sorted(counts)
        assert counts[-1] == value(found, "bps_operation_duration_seconds_count") == ROUNDS
        assert value(found, "bps_operation_duration_seconds_bucket", le="+Inf") == ROUNDS
        assert 0 < value(found, "bps_operation_duration_seconds_sum") < 100 * harness.PATIENCE


def test_gauges(embedded):
    for rank, text in enumerate(embedded[0]):
        found = samples(text)
        assert value(found, "bps_epoch") == 1
        assert value(found, "bps_workers") == value(found, "bps_servers") == 2
        assert value(found, "bps_open_operations") == value(found, "bps_open_rounds") == 0
        assert value(found, "bps_oldest_round_age_seconds") == 0
        assert value(found, "bps_registered_memory_bytes") >= COUNT * 4
        other = f"server {1 - rank}"  # over TCP: it grants landing slots, and those are all here again
        assert value(found, "bps_credits", peer=other, size="large") > 0
        assert value(found, "bps_partitions_in_flight", peer=other) == 0
        assert value(found, "bps_heartbeat_age_seconds") < 30 * harness.PATIENCE
        assert value(found, "process_resident_memory_bytes") > 1 << 20


def test_the_scheduler_in_a_rank_is_told_with_it(embedded):
    first, second = (samples(text) for text in embedded[0])
    assert value(first, "bps_scheduler_declarations_total", role="scheduler") == 2
    assert not [one for one in second if one.name.startswith("bps_scheduler")]


def test_each_family_is_described_once(embedded):
    for text in embedded[0]:
        described = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
        assert described == helped
        assert len(described) == len(set(described))
        assert all(line.split(maxsplit=3)[3] for line in text.splitlines() if line.startswith("# HELP"))


def test_names_follow_the_conventions(embedded):
    for family in text_string_to_metric_families(embedded[0][0]):
        for sample in family.samples:
            assert sample.name.startswith(("bps_", "process_"))
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name


LOOKS = """
import json, os, sys, urllib.request
import numpy as np
import bps_rdma as bps
bps.init()
for _ in range(5):
    bps.push_pull_inplace(np.ones(1000, np.float32), name="x")
port = int(os.environ["BPS_METRICS_PORT"])
texts = [urllib.request.urlopen(f"http://127.0.0.1:{port + i}/metrics").read().decode() for i in range(4)]
bps.shutdown()
print("TEXTS " + json.dumps(texts))
"""


def test_all_roles_of_bps_run_serve_one_after_the_other():
    """Ranks, servers, scheduler."""
    port = harness.free_ports(4)
    env = harness.clean_env(BPS_METRICS_PORT=str(port))
    command = [sys.executable, "-c", "from bps_rdma.cli import main; main()", "run", "-np", "1", "--servers", "2"]
    done = harness.run_command([*command, sys.executable, "-c", LOOKS], env=env, within=100)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "TEXTS " in line)
    rank, *servers, scheduler = (samples(text) for text in json.loads(line.partition("TEXTS ")[2]))
    assert value(rank, "bps_operations_total", role="worker", result="complete") == ROUNDS
    assert sorted(one.labels["rank"] for server in servers for one in server if one.name == "bps_info") == ["0", "1"]
    assert sum(value(server, "bps_rounds_total", role="server") for server in servers) > 0
    assert not [one for server in servers for one in server if one.name == "bps_open_operations"]
    assert value(scheduler, "bps_scheduler_declarations_total") == 1
    assert value(scheduler, "process_cpu_seconds_total") > 0


def serves_none(bps: Any) -> int:
    bps.push_pull_inplace(np.ones(8, np.float32), name="x")
    return int(bps.metrics()["total"]["operations"])


def test_a_port_that_is_taken_ends_no_job():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"BPS_METRICS_PORT": str(taken.getsockname()[1])}
        with harness.start(serves_none, workers=1, env=env) as job:
            assert job.results() == [1]
            assert "no metrics are served: cannot listen on" in job.log("rank 0")


def waits(bps: Any) -> str:
    bps.barrier()
    mark("ready")
    await_mark("over")
    return ""


def test_only_loopback_is_served_unless_told_otherwise():
    port = harness.free_ports(1)
    for host, everywhere in (("127.0.0.1", False), ("*", True)):
        with harness.start(waits, workers=1, env={"BPS_METRICS_PORT": str(port), "BPS_METRICS_HOST": host}) as job:
            job.await_marks("ready")
            tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
            bound = [line.split()[1] for line in tables.splitlines() if f":{port:04X} " in line and " 0A " in line]
            assert bound, tables
            assert [set(one.split(":")[0]) == {"0"} for one in bound] == [everywhere]
            job.set_mark("over")
            job.results()


@pytest.fixture
def port_of_a_rank():
    port = harness.free_ports(1)
    with harness.start(waits, workers=1, env={"BPS_METRICS_PORT": str(port)}) as job:
        job.await_marks("ready")
        yield port
        job.set_mark("over")
        job.results()


def test_http(port_of_a_rank):
    status, kind, text = fetch(port_of_a_rank)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert text
    assert fetch(port_of_a_rank, "/metrics?x=1")[0] == 200
    assert fetch(port_of_a_rank, method="HEAD")[::2] == (200, "")
    assert fetch(port_of_a_rank, "/")[0] == 404
    assert fetch(port_of_a_rank, method="POST")[0] == 405


def test_connections_that_say_nothing_keep_nobody_out(port_of_a_rank):
    silent = [socket.create_connection(("127.0.0.1", port_of_a_rank)) for _ in range(100)]
    try:
        assert fetch(port_of_a_rank)[0] == 200
        kept = sum(1 for one in silent if is_open(one))
        assert kept <= 16
    finally:
        for one in silent:
            one.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("request_", [b"\x00" * 20_000, b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 5000, b"\r\n\r\n"])
def test_bad_requests_change_nothing(port_of_a_rank, request_):
    with socket.create_connection(("127.0.0.1", port_of_a_rank), timeout=30) as connection:
        try:
            connection.sendall(request_)
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b"HTTP/1.1 431"  # closed before all of it was sent
    assert answer.split()[1] in (b"400", b"431")
    assert fetch(port_of_a_rank)[0] == 200


def counts_under_a_stuck_loop(bps: Any) -> tuple[int, float]:
    bps.push_pull_inplace(np.ones(8, np.float32), name="x")
    mark("ready")
    await_mark("stuck")
    start = time.monotonic()
    total = bps.metrics()["total"]
    took = time.monotonic() - start
    mark("counted")
    return int(total["silent_loops"]), took


def test_metrics_of_a_hung_loop_come_within_a_deadline():
    """Process::metrics() waited for every loop for ever."""
    port = harness.free_ports(1)
    with harness.start(counts_under_a_stuck_loop, workers=1, env={"BPS_METRICS_PORT": str(port)}) as job:
        job.await_marks("ready")
        with frozen(thread_of(job.pid("rank 0"), "bps-loop-0")):
            job.set_mark("stuck")
            job.await_marks("counted")
            found = samples(fetch(port)[2])
        silent, took = job.results()[0]
    assert silent == 1
    assert took >= 1.9  # the deadline, and not an answer
    assert value(found, "bps_loop_up", loop="bps-loop-0") == 0
    assert value(found, "bps_operations_total", result="complete") == 1


def collects(bps: Any) -> tuple[list[str], float, bool]:
    import prometheus_client

    from bps_rdma.prometheus import Collector

    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector())
    before = prometheus_client.generate_latest(registry)
    bps.init()
    bps.push_pull_inplace(np.ones(8, np.float32), name="x")
    text = prometheus_client.generate_latest(registry).decode()
    bps.shutdown()
    after = prometheus_client.generate_latest(registry)
    found = samples(text)
    names = sorted({one.name for one in found})
    return names, value(found, "bps_operations_total", result="complete"), before == after == b""


def test_a_collector_for_prometheus_client(embedded):
    names, operations, empty = harness.run(collects, workers=1, init=False)[0]
    served = {one.name for one in samples(embedded[0][0]) if one.name.startswith("bps_")}
    # Slots are granted over networks only. prometheus_client adds when a counter began.
    assert served - set(names) == {"bps_credits"}
    assert operations == 1
    assert empty


def test_sigterm_while_a_rank_is_scraped_ends_it():
    """The thread that answers holds up no end."""
    port = harness.free_ports(1)
    with harness.start(waits, workers=1, env={"BPS_METRICS_PORT": str(port)}) as job:
        job.await_marks("ready")
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"GET /metrics")
            job.kill("rank 0", signal.SIGTERM)
            job.wait("rank 0")
