# SPDX-License-Identifier: Apache-2.0
"""Codes that torch has a dtype for are the bytes that torch makes."""

import numpy as np
import pytest
import torch

from bps_rdma.compression import Codec


def values(count: int) -> torch.Tensor:
    """Of all magnitudes, with ties between two codes among them."""
    generator = torch.Generator().manual_seed(count)
    normal = torch.randn(count, generator=generator)
    spread = normal * 2.0 ** torch.randint(-30, 16, (count,), generator=generator)
    return torch.cat([spread, (normal * 16).round() / 32, torch.zeros(3), -torch.zeros(2)])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_halves(text: str, dtype: torch.dtype) -> None:
    given = torch.cat([values(5000), torch.tensor([1e38, -1e38, torch.inf, -torch.inf])])
    code = Codec(text).encode(given.numpy())
    assert code == bytes_of(given.to(dtype))
    decoded = Codec(text).decode(code, len(given))
    assert decoded.tobytes() == given.to(dtype).float().numpy().tobytes()


@pytest.mark.parametrize("row", [16, 1000])
def test_fp8_by_row(row: int) -> None:
    given = values(4 * row)[: 4 * row].view(4, row)
    scale = given.abs().amax(1, keepdim=True) / 448
    elements = (given * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = b"".join(bytes_of(s) + bytes_of(e) for s, e in zip(scale, elements, strict=True))
    codec = Codec(f"fp8:row={row}")
    assert codec.encode(given.numpy()) == expected
    decoded = codec.decode(expected, given.numel())
    np.testing.assert_array_equal(decoded, (elements.float() * scale).flatten().numpy())


def test_elements_of_mxfp8() -> None:
    given = values(3200)[:3200].view(-1, 32)
    exponent = torch.frexp(given.abs().amax(1, keepdim=True)).exponent - 1 - 8
    elements = (given * 2.0**-exponent).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = b"".join(bytes([int(e) + 127]) + bytes_of(block) for e, block in zip(exponent, elements, strict=True))
    assert Codec("mxfp8").encode(given.numpy()) == expected
