# SPDX-License-Identifier: Apache-2.0
"""Compressed tensors of 16-bit floats: what the references say, and what ranks do."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from reference import codecs

from bodies.compression import COUNT, by_partition, gradient
from bps_rdma import job

SERVER = 2**32 - 1  # as a sender
ROUNDS = {"float16": codecs.fp16, "bfloat16": codecs.bf16}


def halves(values: np.ndarray, dtype: str) -> Any:
    """An array or a tensor with these numbers, rounded."""
    code, _ = ROUNDS[dtype](values.astype(np.float32), 0)
    if dtype == "float16":
        return np.frombuffer(bytearray(code), np.float16)
    import torch

    return torch.from_numpy(np.frombuffer(bytearray(code), np.int16)).view(torch.bfloat16)


def floats(array: Any) -> np.ndarray:
    """What they stand for, in float32."""
    found: np.ndarray = array.astype(np.float32) if isinstance(array, np.ndarray) else array.float().numpy()
    return found


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return ROUNDS[dtype](values, 0)[1]


@dataclass
class Encoder:
    """A sender, and what it remembers."""

    text: str
    feedback: bool
    momentum: float = 0.0
    residual: np.ndarray = field(default_factory=lambda: np.zeros(COUNT, np.float32))
    velocity: np.ndarray = field(default_factory=lambda: np.zeros(COUNT, np.float32))

    def decoded(self, values: np.ndarray, tensor: int, step: int, sender: int) -> np.ndarray:
        """What the others make of its code."""
        with np.errstate(all="ignore"):
            if self.momentum:
                self.velocity = np.float32(self.momentum) * self.velocity + values
                values = values + np.float32(self.momentum) * self.velocity
                self.velocity[~np.isfinite(self.velocity)] = 0
            if not self.feedback:
                return by_partition(self.text, values, tensor, step, sender)
            self.residual += values
            found = by_partition(self.text, self.residual, tensor, step, sender)
            self.residual -= found
            self.residual[~np.isfinite(self.residual)] = 0
            return found


def with_specials(rank: int, step: int) -> np.ndarray:
    values = gradient(rank, step)
    if step == 1:  # what is remembered must not carry it into the next step
        values[5] = np.nan if rank == 0 else 1
        values[9000] = np.inf
    return values


def sums(bps: Any, dtype: str, feedback: bool) -> list[bytes]:
    """By every method: each bit is what the references say."""
    results = []
    for text in [*codecs.METHODS, "topk:k=0.1", "dithering:k=15,partition=natural"]:
        options = [
            each for each in ("feedback=1" if feedback else "", "momentum=0.5" if text == "int8" else "") if each
        ]
        how = text + (":" if ":" not in text else ",") * bool(options) + ",".join(options)
        momentum = 0.5 if text == "int8" else 0.0
        senders = [Encoder(text, feedback, momentum) for _ in range(bps.size())]
        server = Encoder(text, feedback)
        before = bps.metrics()["total"]
        for step in range(3):
            array = halves(with_specials(bps.rank(), step), dtype)
            average = step != 2
            bps.push_pull_inplace(array, average=average, name=text, compression=bps.Compression.from_text(how))
            tensor = job.current().tensors[0, text].id
            pushed = [floats(halves(with_specials(rank, step), dtype)) for rank in range(bps.size())]
            is_plain = text in ("bf16", "fp16")  # its codes would be no shorter
            if not is_plain:
                pushed = [
                    one.decoded(each, tensor, step, i)
                    for i, (one, each) in enumerate(zip(senders, pushed, strict=True))
                ]
            total = pushed[0].copy()
            for each in pushed[1:]:
                total += each
            if average:
                total /= np.float32(bps.size())
            expected = rounded(total if is_plain else server.decoded(total, tensor, step, SERVER), dtype)
            got = floats(array)
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            assert same.all(), (how, step, np.flatnonzero(~same)[:5], got[~same][:5], expected[~same][:5])
            results.append(got.tobytes())
        sent = {key: bps.metrics()["total"][key] - before[key] for key in ("compressed_bytes", "uncompressed_bytes")}
        assert sent["uncompressed_bytes"] == (0 if is_plain else 2 * 3 * COUNT * 2), (how, sent)
        assert sent["compressed_bytes"] <= 0.6 * sent["uncompressed_bytes"], (how, sent)
    return results


def equal_everywhere(bps: Any, dtype: str, text: str) -> tuple[bytes, int]:
    """The result, close to the mean; and the bytes of codes."""
    array = halves(gradient(bps.rank(), 0, 50_000), dtype)
    bps.push_pull_inplace(array, name="g", compression=bps.Compression.from_text(text))
    exact = np.mean([floats(halves(gradient(rank, 0, 50_000), dtype)) for rank in range(bps.size())], axis=0)
    assert np.abs(floats(array) - exact).max() < 0.06
    return floats(array).tobytes(), bps.metrics()["total"]["compressed_bytes"]


def host_sums(bps: Any) -> tuple[bytes, float]:
    """Ranks 0 and 1, on one host, have 256 and 1, whose sum is no bfloat16; rank 2 has 1 more."""
    array = halves(np.full(40_000, [256.0, 1.0, 1.0][bps.rank()]), "bfloat16")
    bps.push_pull_inplace(array, average=False, name="h", compression=bps.RandomK(k=0.45))
    return floats(array).tobytes(), float(floats(array).max())


def large_means(bps: Any, average: bool) -> bytes:
    """Means of what adds up to more than float16 can hold."""
    values = np.full(40_000, 40_000.0) + 32 * bps.rank()
    array = halves(values, "float16")
    bps.push_pull_inplace(array, average=average, name="m", compression=bps.Int8())
    found = floats(array)
    if average:
        assert np.abs(found - 40_000 - 16 * (bps.size() - 1)).max() <= 32, found[:5]
    else:
        assert not np.isfinite(found).any()
    return found.tobytes()


def scattered(bps: Any, dtype: str) -> int:
    """The bytes of codes, of sums that are close."""
    for step in range(3):
        array = halves(gradient(bps.rank(), step, 60_000), dtype)
        part = bps.reduce_scatter(array, name="s", compression=bps.Int8(), average=False)
        exact = sum(floats(halves(gradient(rank, step, 60_000), dtype)) for rank in range(bps.size()))
        begin, end = bps.shard_bounds(60_000, bps.size(), bps.rank())
        assert np.abs(floats(part) - exact[begin:end]).max() < 0.15
    codes: int = bps.metrics()["total"]["compressed_bytes"]
    return codes


def everywhere(bps: Any, dtype: str) -> bytes:
    array = halves(gradient(bps.rank(), 0), dtype)
    exact = sum(floats(halves(gradient(rank, 0), dtype)) for rank in range(bps.size()))
    bps.push_pull_inplace(array, name="plain", average=False, compression=bps.Int8())
    assert (floats(array) == rounded(exact, dtype)).all()  # within a host nothing is compressed
    array = halves(gradient(bps.rank(), 0), dtype)
    bps.push_pull_inplace(array, name="forced", average=False, compression=bps.Int8(everywhere=True))
    assert bps.metrics()["total"]["compressed_bytes"] > 0
    assert 1e-3 < np.abs(floats(array) - exact).max() < 0.15
    return floats(array).tobytes()


def steps(bps: Any, dtype: str, text: str, which: range, states: list[Any] | None) -> tuple[bytes, Any]:
    """The results of some steps, and what is remembered after them."""
    like = halves(gradient(0, 0), dtype)
    bps.declare("g", like, compression=bps.Compression.from_text(text))
    if states is not None:
        bps.load_feedback_state(like, "g", states[bps.rank()])
    results = [
        floats(bps.push_pull(halves(gradient(bps.rank(), step), dtype), average=False, name="g")) for step in which
    ]
    return np.concatenate(results).tobytes(), bps.feedback_state(like, "g")


def in_python(bps: Any, dtype: str) -> None:
    from bps_rdma.compression import register

    def encode(array: np.ndarray, seed: int) -> bytes:
        assert array.dtype == np.float32
        return (array * 8).astype(np.int8).tobytes()

    def decode(code: np.ndarray, elements: int) -> np.ndarray:
        assert len(code) == elements
        return code.view(np.int8).astype(np.float32) / 8

    how = register("eighths", encode, decode, block=1, block_bytes=1)
    bps.barrier()
    array = halves(np.arange(COUNT) % 7 - 3, dtype)
    bps.push_pull_inplace(array, name="e", average=False, compression=how)
    assert (floats(array) == bps.size() * (np.arange(COUNT) % 7 - 3)).all()
    assert bps.metrics()["total"]["compressed_bytes"] > 0
