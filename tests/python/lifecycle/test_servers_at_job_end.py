# SPDX-License-Identifier: Apache-2.0
"""A job ends well while its servers are between two views: so do they."""

import signal
from typing import Any

import harness
import numpy as np
from bodies import views
from harness import mark


def sum_until_the_view_ends(bps: Any) -> None:
    from bps_rdma import job

    array = np.ones(10, np.float32)
    bps.push_pull_inplace(array, name="a", average=False)
    mark("ready")
    harness.eventually(lambda: job.current().process.view_ended, what="the end of the view")


def test_a_server_that_awaits_the_next_view_ends_well_with_the_job():
    env = views.FAST | harness.over("tcp") | {"BPS_MIN_WORKERS": "1", "BPS_HEARTBEAT_TIMEOUT": "20"}
    with harness.start(sum_until_the_view_ends, workers=1, servers=2, env=env) as job:
        job.await_marks("ready")
        job.kill("server 1", signal.SIGSTOP)  # the next view waits for it
        job.start_helper("server 2")  # enters, which ends this view
        assert job.outcomes()[0].status == 0
        assert job.helper_statuses(but=["scheduler", "server 1", "server 2"]) == {"server 0": 0}, job.log("server 0")
        job.kill("server 1", signal.SIGCONT)
        assert job.helper_statuses(but=["server 2"]) == {"scheduler": 0, "server 0": 0, "server 1": 0}
