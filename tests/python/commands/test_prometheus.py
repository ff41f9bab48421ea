# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks for what there is, and a real Prometheus answers each of its queries from a job that runs."""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.metrics import fetch
from harness import mark

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "examples/prometheus/dashboard.json").read_text())
FOLDER = ROOT / "build/prometheus/usr/bin"  # where ci/setup puts Debian's package


def queries() -> list[tuple[str, str]]:
    """(title, query) of every panel."""
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def names_in_sources() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*.cc") if path.name != "trace_json.cc"]
    return {name for text in texts for name in re.findall(r'"((?:bps|process)_[a-z0-9_]+)"', text)}


def names_in(query: str) -> set[str]:
    found = re.findall(r"\b(?:bps|process)_[a-z0-9_]+\b", query)
    return {re.sub(r"_(bucket|count|sum)$", "", name) if "duration" in name else name for name in found}


def test_the_dashboard_asks_for_metrics_that_exist():
    known = names_in_sources()
    assert len(queries()) > 20
    for title, query in queries():
        assert names_in(query), title
        assert names_in(query) <= known, title


def test_the_dashboard_is_one_that_grafana_reads():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    for title, query in queries():
        assert set(re.findall(r"\$\{?(\w+)", query)) <= variables, title
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])


def program(name: str) -> str:
    found = shutil.which(name, path=str(FOLDER)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; ci/setup --dev fetches it where there is apt-get")
    return found


def test_promtool_finds_nothing_to_complain_about():
    tool = program("promtool")
    port = harness.free_ports(1)
    with harness.start(pushes_until_told, workers=1, env={"BPS_METRICS_PORT": str(port)}) as job:
        job.await_marks("pushed")
        text = fetch(port)[2]
        job.set_mark("looked")
        job.results()
    done = subprocess.run([tool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def pushes_until_told(bps: Any) -> None:
    array = np.ones(1 << 18, np.float32)
    for step in range(1 << 30):
        told = bps.push_pull(np.array([float(harness.is_marked("looked"))], np.float32), name="told", average=False)
        if told[0] > 0:
            return
        bps.push_pull_inplace(array, name="x")
        if step == 3:
            mark("pushed")


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """The address of one that scrapes these targets every 200 ms."""
    config = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "1h"},
        "scrape_configs": [{"job_name": "bps_rdma", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{harness.free_port()}"
    command = [
        program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        assert soon(f"http://{address}", "vector(1)"), (folder / "log").read_text()
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def ask(address: str, query: str) -> list[Any]:
    """The result of an instant query; nothing while Prometheus starts."""
    url = f"{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []


def soon(address: str, query: str) -> list[Any]:
    return harness.eventually(lambda: ask(address, query), what=f"an answer to {query}")


def test_a_prometheus_answers_every_query_of_the_dashboard(tmp_path):
    port = harness.free_ports(2)
    env = {"BPS_METRICS_PORT": str(port), "BPS_TRANSPORT": "tcp"}
    targets = [f"127.0.0.1:{port + rank}" for rank in range(2)]
    with prometheus(tmp_path, targets) as address, harness.start(pushes_until_told, env=env) as job:
        job.await_marks("pushed")
        assert soon(address, "count(up == 1) == 2")
        for title, query in queries():
            concrete = query.replace("$job", ".*").replace("$__rate_interval", "5s")
            if "rdma_port" in query:  # there is no such device
                assert ask(address, concrete) == [], title
            else:
                assert soon(address, concrete), f"{title}: {concrete}"
        assert soon(address, "count(rate(bps_operation_bytes_total[5s]) > 0) == 2")
        job.set_mark("looked")
        job.results()
