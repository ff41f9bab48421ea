# SPDX-License-Identifier: Apache-2.0
"""Pools, and jobs that end with their test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_daemon import Daemon, PooledJob

MakePool = Callable[..., Daemon]
MakeJob = Callable[..., PooledJob]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def make_pool(stack: ExitStack, tmp_path: Path) -> MakePool:
    def make(**env: str) -> Daemon:
        folder = tmp_path / f"pool-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        pool = Daemon(folder, **env)
        stack.callback(pool.close)
        return pool

    return make


@pytest.fixture
def make_job(stack: ExitStack) -> MakeJob:
    def make(pool: Daemon, user: str, *options: str, **env: str) -> PooledJob:
        job = PooledJob(pool, user, *options, env=env)
        stack.callback(job.end)
        return job

    return make


@pytest.fixture
def pool(make_pool: MakePool) -> Daemon:
    """Four cores, a gibibyte, four jobs."""
    return make_pool()
