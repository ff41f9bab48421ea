# SPDX-License-Identifier: Apache-2.0
"""Each compression method against its definition in numpy (reference/codecs.py): the same bytes, the same values."""

from dataclasses import fields

import numpy as np
import pytest
from reference import codecs

from bps_rdma import InvalidArgumentError
from bps_rdma.compression import (
    BFloat16,
    Codec,
    Compression,
    Dithering,
    Float16,
    Fp8,
    Int4,
    Int8,
    MxFp8,
    OneBit,
    RandomK,
    Registered,
    TopK,
    Uncompressed,
)

# The bytes of each element in a large partition; float32 has 4.
BYTES = {
    BFloat16: 2, Float16: 2, MxFp8: 33 / 32, Fp8: 1 + 4 / 1024, Int8: 260 / 256, Int4: 66 / 128, OneBit: 1 / 8,
    TopK: 0.08, RandomK: 0.04, Dithering: 0.5,
}  # fmt: skip
TEXTS = [
    *(kind._method for kind in BYTES),
    "fp8:row=7",
    "onebit:scaling=0",
    "topk:k=0.3",
    "topk:k=5",
    "topk:k=2000",
    "randomk:k=0.3",
    "randomk:k=7",
    "dithering:k=1",
    "dithering:k=7,normalize=l2",
    "dithering:k=8,partition=natural",
    "dithering:k=127,partition=natural,normalize=l2",
    "dithering:k=100",
]
COMMON = ("feedback", "momentum", "everywhere", "seed", "text")
COUNTS = (0, 1, 2, 7, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1000, 1025)


def drawn(count: int) -> list[np.ndarray]:
    """Arrays of all kinds of values."""
    generator = np.random.default_rng(count)
    normal = generator.standard_normal(count).astype(np.float32)
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    finite = np.where((bits & 0x7F800000) == 0x7F800000, bits & 0x807FFFFF, bits).astype(np.uint32)
    return [
        normal,
        normal * np.float32(1e-3),
        (normal * np.float32(1e-41)).astype(np.float32),
        np.clip(normal * np.float32(2e38), -3.4028235e38, 3.4028235e38).astype(np.float32),
        finite.view(np.float32),
        np.zeros(count, np.float32),
        -np.zeros(count, np.float32),
        np.round(normal).astype(np.float32),  # with ties
        np.ones(count, np.float32),
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_and_values_are_those_of_the_definition(text: str) -> None:
    codec = Codec(text)
    for count in COUNTS:
        for i, values in enumerate(drawn(count)):
            seed = 1000 * count + i
            code = codec.encode(values, seed)
            with np.errstate(over="ignore", invalid="ignore"):
                expected, back = codecs.reference(text, values, seed)
            assert code == expected, (count, i)
            assert len(code) == codec.encoded_size(count)
            np.testing.assert_array_equal(codec.decode(code, count), back, str((count, i)))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(text: str, special: float) -> None:
    codec = Codec(text)
    for count in (1, 130, 1000):
        values = drawn(count)[0]
        values[count // 2] = special
        code = codec.encode(values, 3)
        with np.errstate(over="ignore", invalid="ignore"):
            expected, back = codecs.reference(text, values, 3)
        decoded = codec.decode(code, count)
        np.testing.assert_array_equal(decoded, back)
        if text[:4] not in ("fp16", "bf16"):  # whose NaN keep their sign
            assert code == expected
        assert not np.isfinite(decoded).all()  # whoever looks for overflows finds one
        if not text.startswith("randomk"):
            assert not np.isfinite(decoded[count // 2])


@pytest.mark.parametrize("text", ["dithering:k=3", "dithering:k=5,partition=natural", "dithering:k=2,normalize=l2"])
def test_dithering_expects_what_it_is_given(text: str) -> None:
    values = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    codec = Codec(text)
    mean = np.mean([codec.decode(codec.encode(values, seed), 200).astype(np.float64) for seed in range(4000)], axis=0)
    spread = np.abs(values).max() if "l2" not in text else np.linalg.norm(values)
    assert np.abs(mean - values).max() < 5 * spread / np.sqrt(4000)


def test_randomk_draws_every_element_about_as_often() -> None:
    codec, count = Codec("randomk:k=10"), 105
    drawn_often = np.zeros(count)
    for seed in range(4000):
        drawn_often += codec.decode(codec.encode(np.ones(count, np.float32), seed), count)
    expected = 4000 * 10 / count
    assert np.abs(drawn_often - expected).max() < 6 * np.sqrt(expected)


def test_each_method_is_an_object_with_the_same_parameters() -> None:
    count = 1 << 16
    for kind, nbytes in BYTES.items():
        one = kind()
        assert one.text == kind._method
        assert Codec(one).encoded_size(count) / count == pytest.approx(nbytes, abs=1e-3), one
        for each in fields(kind):  # the defaults of the object are those of the core
            if each.name not in COMMON:
                values = drawn(1000)[0]
                written = f"{one.text}:{each.name}={int(each.default) if each.default is True else each.default}"
                assert Codec(written).encode(values, 1) == Codec(one.text).encode(values, 1), written
        assert kind(feedback=True, seed=7, everywhere=True).text == f"{one.text}:feedback=1,everywhere=1,seed=7"
        assert Codec(kind(feedback=True)).feedback
        assert not Codec(one).feedback
    assert TopK(k=0.1, feedback=True, momentum=0.5).text == "topk:k=0.1,feedback=1,momentum=0.5"
    assert OneBit(scaling=False).text == "onebit:scaling=0"
    assert Int8(feedback=True) == Int8(feedback=True) != Int8()
    assert (Compression.fp16, Compression.bf16, Compression.none) == (Float16(), BFloat16(), None)
    assert Uncompressed().text == "none"


def test_objects_refuse_what_texts_refuse() -> None:
    for wrong in (
        Compression,
        lambda: Int8(momentum=2.0),
        lambda: TopK(k=-1),
        lambda: Dithering(partition="other"),
        lambda: Uncompressed(feedback=True),
        lambda: Registered(method="zip"),
    ):
        with pytest.raises(InvalidArgumentError):
            wrong()


def test_refusals() -> None:
    for text in (
        "",
        "zip",
        "int8:k=1",
        "topk:k=0",
        "topk:k=x",
        "fp8:row=0",
        "dithering:k=128",
        "dithering:partition=x",
    ):
        with pytest.raises(InvalidArgumentError):
            Codec(text)
    codec = Codec("int8")
    for code, count in ((b"", 1), (bytes(300), 1), (b"\xff" * 5, 1)):
        with pytest.raises(InvalidArgumentError, match="these are not"):
            codec.decode(code, count)
    with pytest.raises(InvalidArgumentError, match="these are not"):
        Codec("topk:k=2").decode(np.array([1, 1], np.uint32).tobytes() + bytes(8), 5)
    with pytest.raises(InvalidArgumentError, match="these are not"):
        Codec("topk:k=2").decode(np.array([1, 5], np.uint32).tobytes() + bytes(8), 5)
