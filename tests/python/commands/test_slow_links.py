# SPDX-License-Identifier: Apache-2.0
"""`bps why` and `bps top` say which links are slow, as the job's scheduler has found."""

import pytest

from bps_rdma.tools.inspection import top
from bps_rdma.tools.inspection.diagnosis import diagnose
from bps_rdma.tools.inspection.job_state import JobState

SPARE = {"host": "cpu1", "gbps": 25.04, "was_gbps": 100.0}
TRAINER = {"host": "gpu3", "gbps": 0.5, "was_gbps": 1.25}
ONE = "The link of cpu1 (25 Gbit/s of 100) carries less than before: the servers there sum less until that changes."
TWO = "The links of cpu1 (25 Gbit/s of 100), gpu3 (0.5 Gbit/s of 1.25) carry less than before: the servers there sum"


def job(slow: list[dict[str, object]], phase: str = "running") -> JobState:
    return JobState(name="job", scheduler={"phase": phase, "missing": "", "shifts": 1, "slow_links": slow})


@pytest.mark.parametrize("phase", ["running", "suspended"])
@pytest.mark.parametrize(("slow", "said"), [([SPARE], ONE), ([SPARE, TRAINER], TWO)])
def test_why_names_the_slow_links_and_what_was_done(slow, said, phase):
    assert said in diagnose(job(slow, phase)).text


@pytest.mark.parametrize("state", [job([]), JobState(name="job", scheduler={"phase": "running"}), JobState(name="job")])
def test_without_a_slow_link_nothing_is_said_of_links(state):
    assert "link" not in diagnose(state).text


def test_top_says_it_below_the_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    top.print_members(job([SPARE]), [])
    assert ONE in " ".join(capsys.readouterr().out.split())
