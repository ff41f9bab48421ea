# SPDX-License-Identifier: Apache-2.0
"""`with init(...):` leaves the job at the end of the block, and tells the other ranks of an exception."""

from typing import Any

import harness
import numpy as np
import pytest

import bps_rdma
from bps_rdma import _core

ENV = {"BPS_TIMEOUT": str(60 * harness.PATIENCE), "BPS_SHUTDOWN_TIMEOUT": str(60 * harness.PATIENCE)}


@pytest.mark.parametrize("face", ["bps_rdma", "bps_rdma.torch"])
@harness.on_ranks(workers=2, init=False)
def test_a_block_leaves_the_job_that_it_joined(bps: Any, face: str) -> None:
    import importlib

    face_of = importlib.import_module(face)
    for _ in range(3):
        with face_of.init(partition_bytes=1 << 16):
            assert bps.push_pull(np.ones(3, np.float32), average=False).tolist() == [2, 2, 2]
            with face_of.init():  # without effect
                pass
            assert bps.is_initialized()
            bps.barrier()
        assert not bps.is_initialized()
    face_of.init()
    with face_of.init():
        pass
    assert bps.is_initialized(), "the block did not join"
    bps.shutdown()


def raises(bps: Any) -> str:
    def block() -> None:
        with bps.init():
            bps.barrier()
            if bps.rank() == 1:
                raise ValueError("no such sample")
            bps.push_pull(np.ones(1000, np.float32), name="blocked")

    with pytest.raises((ValueError, bps.PeerLostError)) as caught:
        block()
    assert not bps.is_initialized()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_exception_that_leaves_a_block_is_told_to_the_others() -> None:
    first, second = harness.run(raises, workers=2, init=False, env=ENV)
    assert second == "ValueError: no such sample"
    assert first.startswith("PeerLostError")
    assert "no such sample" in first


@harness.on_ranks(workers=2, init=False, env=ENV)
def test_an_exit_from_a_block_leaves_as_others_do(bps: Any) -> None:
    def block() -> None:
        with bps.init():
            bps.push_pull(np.ones(10, np.float32), name="w")
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        block()
    assert not bps.is_initialized()


def test_the_type_of_settings_has_all_of_them() -> None:
    names = {name.removeprefix("BPS_").lower() for name, *_ in _core.Config.table()}
    assert set(bps_rdma.Settings.__annotations__) == names


def compressed(bps: Any) -> int:
    with bps.init(compression=bps.Int8(), min_compress_bytes=64, transport="tcp"):
        found = {one.name: one.value for one in bps.config()}
        assert found["BPS_COMPRESSION"] == "int8"
        bps.push_pull(np.ones(1000, np.float32))
        bps.barrier()
        return int(bps.metrics()["total"]["compressed_bytes"])


def test_a_setting_may_be_an_object() -> None:
    assert sum(harness.run(compressed, workers=2, init=False)) > 0


@harness.on_ranks(workers=3)
def test_a_group_knows_the_place_of_this_rank(bps: Any) -> None:
    rank = bps.rank()
    assert bps.Group(0, (0, 1, 2)).rank == rank
    if rank != 1:
        assert bps.new_group([2, 0]).rank == (0 if rank == 0 else 1)
    else:
        with pytest.raises(ValueError, match="not in"):
            _ = bps.Group(7, (0, 2)).rank


def test_handles_are_generic() -> None:
    assert bps_rdma.Handle[np.ndarray].__origin__ is bps_rdma.Handle
    assert bps_rdma.PreparedOperation[np.ndarray].__args__ == (np.ndarray,)
