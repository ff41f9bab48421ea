# SPDX-License-Identifier: Apache-2.0
"""Metrics of this process for a program that serves its own with prometheus_client.

import prometheus_client
from bps_rdma.prometheus import Collector

prometheus_client.REGISTRY.register(Collector())
prometheus_client.start_http_server(9400)

Without such a program BPS_METRICS_PORT does it: the answer then comes from a thread of the core, which no other Python
thread can hold up, and needs no package.
"""

from __future__ import annotations

from collections.abc import Iterable

from bps_rdma import job
from bps_rdma.errors import NotInitializedError, RoundAbortedError
from bps_rdma.extras import require
from bps_rdma.kept_errors import keeping

require("prometheus_client", "bps_rdma.prometheus")

from prometheus_client import registry  # noqa: E402  # after the check that says how to install it
from prometheus_client.metrics_core import Metric  # noqa: E402

__all__ = ["Collector"]


class Collector(registry.Collector):
    """The metrics of BPS_METRICS_PORT without those of memory and time, which prometheus_client has as well.

    Collects when it is asked, for two seconds at most; nothing before init() and after shutdown(). Any thread may ask.
    """

    def describe(self) -> Iterable[Metric]:
        """Returns no names in advance: the role of this process decides which ones there are."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families of this moment."""
        try:
            with keeping:
                families = job.asked(lambda process: process.metric_families())
        except (NotInitializedError, RoundAbortedError):  # the next view has not begun yet
            return
        for name, kind, text, samples in families:
            family = Metric(name, text, kind)
            for suffix, labels, value in samples:
                family.add_sample(name + suffix, labels, value)
            if samples:
                yield family
