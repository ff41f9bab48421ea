# SPDX-License-Identifier: Apache-2.0
"""Compressed tensors through real processes: what arrives is what the codes say, the same on all ranks."""

import contextlib
from typing import Any

import harness
import numpy as np
import pytest
from bodies.compression import (
    COUNT,
    PARTITION,
    by_partition,
    equal_everywhere,
    fed_back,
    gradient,
    many_at_once,
    scattered,
    sums,
)
from reference.codecs import METHODS

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError

TCP = {"BPS_TRANSPORT": "tcp", "BYTEPS_PARTITION_BYTES": str(PARTITION), "BPS_MIN_PARTITION_BYTES": str(PARTITION)}
DENSE = ("fp16", "bf16", "int8")


def forms() -> list[Any]:
    """Of methods whose references are slow, the landing takes the mean alone."""
    texts = [*METHODS, "topk:k=0.1", "randomk:k=100", "dithering:k=15,partition=natural"]
    return [
        pytest.param(text, average, marks=pytest.mark.long if "dithering" in text and not average else [])
        for text in texts
        for average in (True, False)
    ]


@pytest.mark.parametrize(("text", "average"), forms())
def test_sums_are_what_the_codes_say(text: str, average: bool) -> None:
    first, second, third = harness.run(sums, text, average, workers=3, servers=2, env=TCP)
    assert first == second == third


# Servers in the workers: each rank's contribution to its own server needs no code, but gets the answer that others get.
@pytest.mark.parametrize("method", DENSE)
def test_with_servers_in_the_workers_all_ranks_get_the_same_bits(method: str) -> None:
    results = harness.run(equal_everywhere, method, workers=3, env=TCP)
    assert len({result[0] for result in results}) == 1
    ratio = {"fp16": 0.5, "bf16": 0.5, "int8": 260 / 1024}[method]
    for _, counted in results:
        assert ratio < counted["compressed_bytes"] / counted["uncompressed_bytes"] < ratio + 0.01


# Hosts sum first; what crosses the network is compressed, once per host.
@pytest.mark.parametrize("layout", ["aabb", "aaab", "abab"])
@pytest.mark.parametrize("servers", [None, 1])
def test_hosts_sum_before_they_compress(layout: str, servers: int | None) -> None:
    env = {key: TCP[key] for key in TCP if key != "BPS_TRANSPORT"}
    results = harness.run(equal_everywhere, "int8", servers=servers, env=env, **harness.on_hosts(layout))
    assert len({result[0] for result in results}) == 1
    assert sum(counted["compressed_bytes"] for _, counted in results) > 0
    # Each of two hosts sends and gets the tensor at most once.
    assert sum(counted["uncompressed_bytes"] for _, counted in results) <= 2 * 2 * 50_000 * 4


def test_reduce_scatter() -> None:
    harness.run(scattered, workers=3, env=TCP)
    harness.run(scattered, workers=2, servers=1, env=TCP)


# The same gradient again and again: without feedback its error is made every time.
@pytest.mark.parametrize("method", ["int8", "bf16", "int4", "mxfp8"])
@pytest.mark.parametrize("servers", [None, 1])
def test_what_a_round_loses_comes_with_the_next_ones(method: str, servers: int | None) -> None:
    harness.run(fed_back, method, workers=2, servers=servers, env=TCP)


@pytest.mark.parametrize("text", ["topk:k=0.05,feedback=1", "randomk:k=0.05,feedback=1", "onebit:feedback=1"])
@harness.on_ranks(workers=2, servers=1, env=TCP)
def test_sparse_methods_send_everything_in_the_end(bps: Any, text: str) -> None:
    gradients = [gradient(rank, 0) for rank in range(bps.size())]
    exact = np.mean([one.astype(np.float64) for one in gradients], axis=0)
    total, how = np.zeros(COUNT), bps.Compression.from_text(text)
    for step in range(1, 401):
        total += bps.push_pull(gradients[bps.rank()], name="g", compression=how)
        if step == 100:
            early = np.abs(total / step - exact).mean()
    late = np.abs(total / 400 - exact).mean()
    # What has not been sent yet stays bounded, while the sum grows.
    assert late < early / 3, (early, late)


@harness.on_ranks(workers=1, servers=1, env=TCP)
def test_momentum_is_nesterovs(bps: Any) -> None:
    momentum = np.zeros(COUNT, np.float32)
    for step in range(5):
        g = gradient(bps.rank(), step)
        g[step] = np.inf
        array = g.copy()
        bps.push_pull_inplace(array, name="m", average=False, compression=bps.BFloat16(momentum=0.5))
        momentum = np.float32(0.5) * momentum + g
        sent = g + np.float32(0.5) * momentum
        momentum[~np.isfinite(momentum)] = 0  # a round that overflows spoils no later one
        expected = by_partition("bf16", by_partition("bf16", sent, 0, 0, 0), 0, 0, 0)
        assert (array == expected).all(), step


def momentum_of_all(bps: Any) -> None:
    """Ranks give other constants. All numbers are short enough for bfloat16."""
    kept = 0.0
    for step in range(4):
        kept = 0.5 * kept + 1
        array = np.full(COUNT, 1 << bps.rank(), np.float32)
        bps.push_pull_inplace(array, name="m", average=False, compression=bps.BFloat16(momentum=0.5))
        expected = ((1 << bps.size()) - 1) * (1 + 0.5 * kept)
        assert array.min() == array.max() == expected, (step, array.min(), array.max(), expected)


@pytest.mark.parametrize("servers", [None, 2])
@pytest.mark.parametrize("layout", ["ab", "aa", "aab"])
def test_all_contributions_get_the_same_momentum(layout: str, servers: int | None) -> None:
    """Also those that go to a server on their own host."""
    harness.run(momentum_of_all, servers=servers, env=harness.cut_at(PARTITION), **harness.on_hosts(layout))


def everywhere(bps: Any) -> bytes:
    array = gradient(bps.rank(), 0)
    bps.push_pull_inplace(array, name="plain", average=False, compression=bps.Int8())
    exact = sum(gradient(rank, 0) for rank in range(1, bps.size())) + gradient(0, 0)
    assert np.abs(array - exact).max() < 1e-5  # within a host nothing is compressed
    assert bps.metrics()["total"]["compressed_bytes"] == 0
    array = gradient(bps.rank(), 0)
    bps.push_pull_inplace(array, name="forced", average=False, compression=bps.Int8(everywhere=True))
    assert bps.metrics()["total"]["compressed_bytes"] > 0
    assert 1e-4 < np.abs(array - exact).max() < 0.15
    return array.tobytes()


@pytest.mark.parametrize("env", [{}, {"BPS_SHM_CMA": "0"}])
@pytest.mark.parametrize("servers", [None, 1])
def test_on_one_host_only_if_that_is_asked_for(env: dict[str, str], servers: int | None) -> None:
    small = {key: TCP[key] for key in TCP if key != "BPS_TRANSPORT"}
    assert len(set(harness.run(everywhere, workers=2, servers=servers, env=env | small))) == 1


@harness.on_ranks(workers=2, env=TCP)
def test_only_sums_are_compressed(bps: Any) -> None:
    bps.declare("t", shape=COUNT, dtype=np.float32, compression=bps.Int8())
    array = gradient(1, 0) if bps.rank() == 1 else np.zeros(COUNT, np.float32)
    bps.broadcast(array, root=1, name="t")
    assert (array == gradient(1, 0)).all()
    array = gradient(bps.rank(), 1)
    bps.push_pull_inplace(array, op="max", name="t")
    assert (array == np.maximum(gradient(0, 1), gradient(1, 1))).all()
    whole = bps.all_gather(gradient(bps.rank(), 2, COUNT // 2), name="t")
    assert (whole == np.concatenate([gradient(rank, 2, COUNT // 2) for rank in range(2)])).all()
    assert bps.metrics()["total"]["compressed_bytes"] == 0
    bps.push_pull_inplace(array, name="t")
    assert bps.metrics()["total"]["compressed_bytes"] > 0
    with pytest.raises(bps.InvalidArgumentError, match="another kind"):
        bps.reduce_scatter(array, name="t")
    bps.barrier()


@harness.on_ranks(workers=2, env=TCP)
def test_specials(bps: Any) -> None:
    for method in DENSE:
        how = bps.Compression.from_text(method)
        for count in (0, 1, 17, 4096, 4097):
            array = np.ones(count, np.float32)
            bps.push_pull_inplace(array, average=False, name=f"{method} {count}", compression=how)
            assert (array == bps.size()).all()
        array = gradient(bps.rank(), 0)
        array[5] = np.nan if bps.rank() == 0 else 1
        array[9000] = np.inf
        bps.push_pull_inplace(array, name=f"{method} nan", compression=how)
        assert np.isnan(array[5])
        assert not np.isfinite(array[9000])
        assert np.isfinite(array[300])
        backing = np.frombuffer(bytearray(4 * COUNT + 1), np.uint8)[1:]
        unaligned = backing.view(np.float32)
        unaligned[:] = 2
        bps.push_pull_inplace(unaligned, average=False, name=f"{method} unaligned", compression=how)
        assert (unaligned == 2 * bps.size()).all()


@harness.on_ranks(workers=2, env=TCP)
def test_prepared_operations(bps: Any) -> None:
    array = np.empty(COUNT, np.float32)
    operation = bps.prepare("push_pull", array, average=False, name="p", compression=bps.Int8())
    for step in range(20):
        array[:] = gradient(bps.rank(), step)
        operation()
        exact = sum(gradient(rank, step).astype(np.float64) for rank in range(bps.size()))
        assert np.abs(array - exact).max() < 0.15
    assert bps.metrics()["total"]["compressed_bytes"] > 0


# Full windows, several loops, small staging memory: whatever could not be sent at once is not encoded twice.
@pytest.mark.parametrize(
    "env",
    [
        {"BPS_SERVER_WINDOW": "2"},
        {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"},
        {"BPS_STAGING_BYTES": "65536", "BPS_SCHEDULING_CREDIT": "65536"},
    ],
)
def test_many_at_once_are_the_same_as_one_after_the_other(env: dict[str, str]) -> None:
    results = harness.run(many_at_once, workers=3, servers=2, env=TCP | env)
    again = harness.run(many_at_once, workers=3, servers=2, env=TCP)
    assert results[0] == results[1] == results[2] == again[0]


def by_default(bps: Any) -> None:
    big, small = np.ones(COUNT, np.float32), np.ones(100, np.float32)
    bps.push_pull_inplace(small)
    bps.push_pull_inplace(big.astype(np.float64))
    bps.push_pull_inplace(big, name="not this one", compression=bps.Uncompressed())
    assert bps.metrics()["total"]["compressed_bytes"] == 0
    bps.push_pull_inplace(big)
    assert bps.metrics()["total"]["compressed_bytes"] > 0


def test_the_setting_compresses_large_float32_tensors() -> None:
    env = {"BPS_COMPRESSION": "int8", "BYTEPS_MIN_COMPRESS_BYTES": "10000"}
    harness.run(by_default, workers=2, servers=1, env=TCP | env)


@harness.on_ranks(workers=2, env=TCP)
def test_what_cannot_be_done_is_refused(bps: Any) -> None:
    array = np.ones(COUNT, np.float32)
    for wrong, what in (
        ("zip", "no compression method 'zip'"),
        ("int8:k=3", "has no parameter 'k'"),
        ("int8:momentum=2", "momentum=2"),
        ("int8:" + "x" * 130 + "=1", "too long"),
        (7, "says nothing of how to compress"),
        ({"byteps_compressor_k": 3}, "names no method"),
        ({"byteps_compressor_type": "int8", "nonsense": 1}, "nonsense"),
        ({"byteps_compressor_type": "topk", "byteps_compressor_k": -1}, "k=-1"),
        ({"byteps_compressor_type": "dithering", "byteps_dithering_partition": 7}, "none of linear, natural"),
        ({"byteps_compressor_type": "topk", "byteps_error_feedback_type": "other"}, "not supported"),
    ):
        with pytest.raises(bps.InvalidArgumentError, match=what):
            bps.push_pull(array, name="refused", compression=wrong)
    with pytest.raises(bps.InvalidArgumentError, match="only float32"):
        bps.push_pull(array.astype(np.float64), name="double", compression=bps.Int8())
    bps.push_pull(array, name="known", compression=bps.Int8())
    with pytest.raises(bps.MismatchError, match="'int8'"):
        bps.push_pull(array, name="known", compression=bps.BFloat16())
    byteps = {"byteps_compressor_type": "int8", "byteps_error_feedback_type": "vanilla"}
    bps.push_pull(array, name="as BytePS", compression=byteps)
    bps.push_pull(array, name="as BytePS", compression=bps.Int8(feedback=True))
    with pytest.raises(bps.InvalidArgumentError, match="not exact"):
        bps.push_pull(array, compression=bps.Int8(), exact=True)
    all_of_them = {
        "byteps_compressor_type": "dithering",
        "byteps_compressor_k": 7,
        "byteps_seed": 3,
        "byteps_dithering_partition": "natural",
        "byteps_dithering_normalize": "1",
        "byteps_momentum_type": "nesterov",
        "byteps_momentum_mu": 0.5,
    }
    bps.declare("all", like=array, compression=all_of_them)
    assert job.current().tensors[0, "all"].compression == (
        "dithering:k=7,seed=3,partition=natural,normalize=l2,momentum=0.5"
    )
    bps.declare(
        "one bit",
        like=array,
        compression={"byteps_compressor_type": "onebit", "byteps_compressor_onebit_scaling": True},
    )
    bps.push_pull(array, name="one bit")
    bps.barrier()


@harness.on_ranks(workers=2, env=TCP)
def test_ranks_must_agree(bps: Any) -> None:
    array = np.ones(COUNT, np.float32)
    with pytest.raises(bps.MismatchError, match="compressed by 'int8'"):
        bps.push_pull(array, name="d", compression=bps.Int8() if bps.rank() == 0 else bps.Uncompressed())
    bps.barrier()


@harness.on_ranks(workers=3, servers=1, env=TCP | {"BPS_MIN_WORKERS": "1"}, kills="rank 2")
def test_a_name_is_compressed_in_the_next_view_too(bps: Any) -> None:
    bps.declare("d", shape=COUNT, dtype=np.float32, compression=bps.Int8())
    array = np.ones(COUNT, np.float32)
    bps.push_pull(array, name="d")
    harness.mark("running")
    before = bps.size()
    while bps.size() == before:
        with contextlib.suppress(bps.RoundAbortedError):
            bps.push_pull(array, name="d")
    assert (bps.push_pull(array, name="d", average=False) == bps.size()).all()
    assert job.current().tensors[0, "d"].compression == "int8"
    bps.barrier()


def test_a_wrong_setting_is_told_at_once() -> None:
    with pytest.raises(harness.JobFailedError, match="no compression method 'zip'"):
        harness.run(by_default, workers=1, env=TCP | {"BPS_COMPRESSION": "zip"})


@harness.on_ranks(
    workers=2, servers=1, env=TCP | {"BYTEPS_PARTITION_BYTES": str(16 << 20), "BPS_MIN_PARTITION_BYTES": str(16 << 20)}
)
def test_a_code_that_no_server_takes_is_refused_before_anything_is_sent(bps: Any) -> None:
    large = np.ones(5 << 20, np.float32)
    for text in ("topk:k=1e-07", "randomk:k=1e-07,feedback=1"):
        with pytest.raises(InvalidArgumentError) as told:
            bps.push_pull(large, name="sparse", compression=bps.Compression.from_text(text))
        assert f"'sparse' cannot be compressed by '{text}'" in str(told.value), told.value
    assert bps.push_pull(large, name="sparse", average=False, compression=bps.TopK(k=0.001))[0] in (0, 2)
    small = np.ones(1 << 20, np.float32)
    small[7] = 5
    assert bps.push_pull(small, name="small", average=False, compression=bps.TopK(k=0.0000001))[7] == 10
