# SPDX-License-Identifier: Apache-2.0
"""The settings that init() takes, with the types of their values. A test compares them with the core's table."""

from __future__ import annotations

import os
from typing import Literal, TypedDict

from bps_rdma.compression import Compression

__all__ = ["Flag", "Settings"]

Flag = bool | Literal[0, 1, "0", "1"]

# Not a class: one of the names is a keyword of Python, which callers pass as init(**{"async": True}).
Settings = TypedDict(
    "Settings",
    {
        "role": Literal["worker", "server", "scheduler", "joint"],
        "num_workers": int,
        "num_servers": int,
        "worker_id": int,
        "local_rank": int,
        "local_size": int,
        "rank": int,
        "world_size": int,
        "root_uri": str,
        "root_port": int,
        "job_id": str,
        "secret": str,
        "secret_file": str | os.PathLike[str],
        "min_workers": int,
        "server_failover": Flag | Literal["0", "1", "auto"],
        "placement": Literal["auto", "mixed", "dedicated", "embedded"],
        "placement_seconds": int,
        "rsh": str,
        "insecure": Flag,
        "transport": str,
        "interface": str,
        "ports": str,
        "node_host": str,
        "link_gbps": float,
        "host_id": str,
        "tcp_streams": int,
        "tcp_congestion": str,
        "shm_cma": Flag,
        "shm_fence": Literal["kill", "copy"],
        "rdma_hca": str,
        "rdma_gid_index": int,
        "rdma_tc": int,
        "rdma_sl": int,
        "rdma_pkey": int,
        "rdma_timeout": int,
        "rdma_retry_cnt": int,
        "rdma_qps": int,
        "rdma_memory": Literal["watched", "staged", "trusted"],
        "partition_bytes": int,
        "min_partition_bytes": int,
        "scheduling_credit": int,
        "push_thread": int,
        "key_hash_fn": Literal["raw", "djb2", "naive", "built_in", "sdbm", "mixed", "balanced"],
        "host_sum": Flag,
        "compression": Compression | str,
        "min_compress_bytes": int,
        "exact": Flag,
        "async": Flag,
        "staleness": int,
        "built_in_hash_coef": int,
        "mixed_mode_bound": int,
        "staging_bytes": int,
        "gpu_chunk_bytes": int,
        "gpu_chunks": int,
        "server_engine_thread": int,
        "server_window": int,
        "server_memory": int,
        "timeout": float,
        "join_timeout": float,
        "shutdown_timeout": float,
        "heartbeat_timeout": float,
        "scheduler_patience": int,
        "resume_timeout": int,
        "scheduler_state": str | os.PathLike[str],
        "log_level": str,
        "dump_dir": str | os.PathLike[str],
        "metrics_port": int,
        "metrics_host": str,
        "trace": str | os.PathLike[str],
        "trace_on": Flag,
        "trace_dir": str | os.PathLike[str],
        "trace_start_step": int,
        "trace_end_step": int,
        "spin_us": int,
        "fault": str,
    },
    total=False,
)
Settings.__doc__ = """What init() takes as keywords: settings in lower case, without `BPS_`; see docs/settings.md."""
