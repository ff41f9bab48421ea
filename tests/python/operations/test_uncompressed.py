# SPDX-License-Identifier: Apache-2.0
"""A compression that has no effect is said: once in a job for each reason, on one rank, with a name."""

from typing import Any

import harness
import numpy as np
import pytest
from bodies.compressed_halves import halves

TCP = {"BPS_TRANSPORT": "tcp"}
LARGE = 30_000


def lines(body: Any, env: dict[str, str], **where: Any) -> list[str]:
    """What the ranks say of compression, without who says it."""
    with harness.start(body, env=env, **({"workers": 2} | where)) as running:
        outcomes = running.outcomes()
    assert not any(each.error for each in outcomes), outcomes
    said = [line for each in outcomes for line in each.output.splitlines() if "is not compressed by" in line]
    return [line.split("] ", 1)[1] for line in said]


def doubles(bps: Any) -> None:
    for name in ("first", "second"):
        bps.push_pull_inplace(np.ones(LARGE), name=name)
    bps.push_pull_inplace(np.ones(LARGE, np.int64), name="whole numbers")
    bps.broadcast(np.ones(LARGE), root=0, name="weights")
    bps.push_pull_inplace(np.ones(LARGE), name="on purpose", compression=bps.Uncompressed())
    bps.push_pull_inplace(np.ones(LARGE, np.float32), name="compressed")


def test_a_dtype_that_is_not_compressed() -> None:
    (line,) = lines(doubles, TCP | {"BPS_COMPRESSION": "int8"})
    assert line.startswith("'first' is not compressed by 'int8': it is float64, and only float32, float16 and bfloat16")


def small(bps: Any, with_large: bool) -> None:
    for name in ("first", "second"):
        bps.push_pull_inplace(np.ones(100, np.float32), name=name)
    if with_large:
        bps.push_pull_inplace(np.ones(LARGE, np.float32), name="compressed")


def with_a_large_one(bps: Any) -> None:
    small(bps, True)


def without_a_large_one(bps: Any) -> None:
    small(bps, False)


def test_small_tensors() -> None:
    """Among larger ones they are no surprise; where there are no others, the setting does nothing."""
    env = TCP | {"BPS_COMPRESSION": "int8"}
    text = "'first' is not compressed by 'int8': its 400 bytes are fewer than BPS_MIN_COMPRESS_BYTES, 65536"
    assert lines(with_a_large_one, env) == []
    (line,) = lines(with_a_large_one, env | {"BPS_LOG_LEVEL": "INFO"})
    assert line.startswith(text)
    (line,) = lines(without_a_large_one, env)
    assert line == text + "; no tensor of this job was compressed"


def test_a_tensor_that_gets_no_momentum() -> None:
    """Compression would have given it that, and the optimizer has none: this is said also of small ones."""
    (line,) = lines(with_a_large_one, TCP | {"BPS_COMPRESSION": "int8:momentum=0.9"})
    assert "BPS_MIN_COMPRESS_BYTES, 65536, so it gets no momentum" in line
    (line,) = lines(doubles, TCP | {"BPS_COMPRESSION": "int8:momentum=0.9"})
    assert "'first'" in line
    assert "so it gets no momentum" in line


def half_of_a_half(bps: Any) -> None:
    bps.push_pull_inplace(halves(np.ones(100_000), "bfloat16"), name="b", compression=bps.BFloat16())
    bps.push_pull_inplace(halves(np.ones(100_000), "float16"), name="h", compression=bps.BFloat16())
    assert bps.metrics()["total"]["compressed_bytes"] == 0


def test_a_method_that_does_not_shorten() -> None:
    pytest.importorskip("torch")
    (line,) = lines(half_of_a_half, TCP)
    assert line.startswith(
        "'b' is not compressed by 'bf16': the code of its 200000 bytes of bfloat16 would be no shorter"
    )


def compressed(bps: Any) -> None:
    for name in ("first", "second"):
        bps.push_pull_inplace(np.ones(LARGE, np.float32), name=name, compression=bps.Int8())
    bps.push_pull_inplace(np.ones(LARGE, np.float32), name="everywhere", compression=bps.Int8(everywhere=True))


def test_a_job_on_one_host() -> None:
    for servers in (None, 1):
        (line,) = lines(compressed, {}, servers=servers)
        assert line.startswith("'first' is not compressed by 'int8': its ranks and servers are on one host")
    assert lines(compressed, TCP) == []
    assert lines(compressed, {}, **harness.on_hosts("ab")) == []
    assert lines(compressed, {}, **harness.on_hosts("aab")) == []


def in_groups(bps: Any) -> None:
    group = bps.new_group([0, 1] if bps.rank() < 2 else [2, 3])
    how = bps.Int8(momentum=0.5)
    bps.push_pull_inplace(np.ones(LARGE, np.float32), name="first", compression=how, group=group)


def test_a_group_whose_sums_stay_on_its_host() -> None:
    """A server elsewhere is not asked."""
    told = lines(in_groups, {"BPS_PLACEMENT": "dedicated"}, servers=1, **harness.on_hosts("aabb"))
    assert len(told) == 2
    assert all("'first' is not compressed" in one and "so it gets no momentum" in one for one in told)


def largest(bps: Any) -> None:
    bps.push_pull_inplace(np.ones(LARGE, np.float32), name="m", op="max", compression=bps.Int8())


def test_what_does_not_add() -> None:
    (line,) = lines(largest, TCP)
    assert line.startswith("'m' is not compressed by 'int8': only sums and means are")
