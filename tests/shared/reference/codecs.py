# SPDX-License-Identifier: Apache-2.0
"""What each compression method makes of numbers, in numpy: bytes and values, by the definitions in csrc/compress/*.h.

Written for clearness, and independently of the C++ code. Every arithmetic step is in the float type that the definition
names, so that bytes are equal and not merely close.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
F = np.float32
NAN = F(np.nan)
_TINIEST = F(2.0**-126)
_M64 = (1 << 64) - 1


def random_bits(seed: int, i: int) -> int:
    """Output i of SplitMix64."""
    bits = (seed + (i + 1) * 0x9E3779B97F4A7C15) & _M64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _M64
    return bits ^ (bits >> 31)


def random_unit(seed: int, i: int) -> np.float32:
    return F(random_bits(seed, i) >> 40) * F(2.0**-24)


def sum_in_lanes(values: npt.NDArray[np.float64]) -> float:
    lanes = [0.0] * 16
    for i, value in enumerate(values.tolist()):
        lanes[i % 16] += value
    total = 0.0
    for lane in lanes:
        total += lane
    return total


def blocks(values: Floats, size: int) -> list[Floats]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def fp16(values: Floats, seed: int) -> tuple[bytes, Floats]:
    halves = values.astype(np.float16)
    return halves.tobytes(), halves.astype(F)


def bf16(values: Floats, seed: int) -> tuple[bytes, Floats]:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    halves = np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
    return halves.tobytes(), (halves.astype(np.uint32) << 16).view(F)


def int8(values: Floats, seed: int) -> tuple[bytes, Floats]:
    code, back = b"", []
    largest_scale = F(float.fromhex("0x1.020406p121"))
    for block in blocks(values, 256):
        if not np.isfinite(block).all():
            code += NAN.tobytes() + bytes(len(block))
            back.append(np.full(len(block), NAN))
            continue
        scale = min(np.abs(block).max() / F(127), largest_scale)
        scale = scale if scale >= _TINIEST else F(0)
        quanta = np.rint(block * (F(1) / scale)).astype(np.int8) if scale > 0 else np.zeros(len(block), np.int8)
        code += scale.tobytes() + quanta.tobytes()
        back.append(scale * quanta.astype(F))
    return code, join(back)


def join(parts: list[Floats]) -> Floats:
    return np.concatenate(parts).astype(F) if parts else np.empty(0, F)


def e4m3(values: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Rounded to nearest even, and limited to 448, by comparison with every one of the 127 magnitudes."""
    codes = np.arange(127)
    exponents, fractions = codes >> 3, codes & 7
    table = np.where(exponents == 0, fractions / 8 * 2.0**-6, (1 + fractions / 8) * 2.0 ** (exponents - 7.0))
    magnitude = np.minimum(np.abs(values).astype(np.float64), 448)
    above = np.clip(np.searchsorted(table, magnitude), 1, 126)
    low, high = table[above - 1], table[above]
    to_high = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    found = np.where(to_high, above, above - 1)
    sign = np.signbit(values)
    return (found | sign << 7).astype(np.uint8), (np.where(sign, -1.0, 1.0) * table[found]).astype(F)


def mxfp8(values: Floats, seed: int) -> tuple[bytes, Floats]:
    code, back = b"", []
    for block in blocks(values, 32):
        if not np.isfinite(block).all():
            code += b"\xff" + bytes(len(block))
            back.append(np.full(len(block), NAN))
            continue
        largest = np.abs(block).max()
        exponent = int(largest.view(np.uint32)) >> 23
        e = max(exponent - 8, 0)
        with np.errstate(over="ignore"):
            elements, plain = e4m3((block * F(2.0 ** (127 - e))).astype(F))
        code += bytes([e]) + elements.tobytes()
        back.append(plain * F(2.0 ** (e - 127)))
    return code, join(back)


def fp8(values: Floats, seed: int, row: int = 1024) -> tuple[bytes, Floats]:
    code, back = b"", []
    for block in blocks(values, row):
        if not np.isfinite(block).all():
            code += NAN.tobytes() + bytes(len(block))
            back.append(np.full(len(block), NAN))
            continue
        scale = min(np.abs(block).max() / F(448), F(float.fromhex("0x1.249248p119")))
        scale = scale if scale >= _TINIEST else F(0)
        elements, plain = e4m3(block * (F(1) / scale)) if scale > 0 else (np.zeros(len(block), np.uint8), block * 0)
        code += scale.tobytes() + elements.tobytes()
        back.append(plain * scale)
    return code, join(back)


def rotate(block: Floats) -> Floats:
    rotated = block * F(float.fromhex("0x1.6a09e6p-4"))
    distance = 1
    while distance < 128:
        pairs = rotated.reshape(-1, 2, distance)
        rotated = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        distance *= 2
    return rotated


def int4(values: Floats, seed: int) -> tuple[bytes, Floats]:
    code, back = b"", []
    for part in blocks(values, 128):
        block = np.zeros(128, F)
        block[: len(part)] = part
        with np.errstate(invalid="ignore", over="ignore"):
            rotated = rotate(block)
        if not np.isfinite(rotated).all():
            code += b"\xc0\x7f" + bytes(64)
            back.append(np.full(len(part), NAN))
            continue
        exact = np.abs(rotated).max() / F(7)
        bits = int(exact.view(np.uint32))
        scale = np.uint32((bits + 0xFFFF) >> 16 << 16).view(F) if exact >= _TINIEST else F(0)
        quanta = np.rint(rotated * (F(1) / scale)).astype(np.int8) if scale > 0 else np.zeros(128, np.int8)
        nibbles = quanta.astype(np.uint8) & 15
        code += scale.view(np.uint32).tobytes()[2:] + (nibbles[:64] | nibbles[64:] << 4).tobytes()
        back.append(rotate(scale * quanta.astype(F))[: len(part)])
    return code, join(back)


def onebit(values: Floats, seed: int, scaling: int = 1) -> tuple[bytes, Floats]:
    if len(values) == 0:
        return b"", values
    scale = F(1)
    if scaling:
        with np.errstate(over="ignore"):
            scale = F(sum_in_lanes(np.abs(values).astype(np.float64)) / len(values))
    if not np.isfinite(scale) or not np.isfinite(values).all():
        scale = NAN
    negative = values < 0
    return scale.tobytes() + np.packbits(negative, bitorder="little").tobytes(), np.where(negative, -scale, scale)


def sent(count: int, k: float) -> int:
    if count == 0:
        return 0
    wanted = k * count if k < 1 else k
    return count if wanted >= count else max(1, int(wanted))


def topk(values: Floats, seed: int, k: float = 0.01) -> tuple[bytes, Floats]:
    magnitudes = values.view(np.uint32) & 0x7FFFFFFF
    chosen = np.sort(np.argsort(-magnitudes.astype(np.int64), kind="stable")[: sent(len(values), k)])
    back = np.zeros_like(values)
    back[chosen] = values[chosen]
    return chosen.astype(np.uint32).tobytes() + values[chosen].tobytes(), back


def randomk(values: Floats, seed: int, k: float = 0.01) -> tuple[bytes, Floats]:
    count, total = sent(len(values), k), len(values)
    if count == 0:
        return b"", values
    chosen = []
    for j in range(count):
        begin, end = j * total // count, (j + 1) * total // count
        chosen.append(begin + ((random_bits(seed, j) >> 32) * (end - begin) >> 32))
    if not np.isfinite(values).all():
        values = values.copy()
        values[chosen[0]] = NAN
    back = np.zeros_like(values)
    back[chosen] = values[chosen]
    return seed.to_bytes(8, "little") + values[chosen].tobytes(), back


def dithering(
    values: Floats, seed: int, k: int = 4, partition: str = "linear", normalize: str = "max"
) -> tuple[bytes, Floats]:
    if len(values) == 0:
        return b"", values
    bits = 2 if k < 2 else 4 if k < 8 else 8
    with np.errstate(over="ignore", invalid="ignore"):
        euclidean = F(np.sqrt(sum_in_lanes(values.astype(np.float64) ** 2)))
    norm = np.abs(values).max() if normalize == "max" else euclidean
    room = -(-len(values) * bits // 8)
    if not np.isfinite(norm):
        return NAN.tobytes() + bytes(room), np.full(len(values), NAN)
    if norm == 0:
        return F(0).tobytes() + bytes(room), np.zeros_like(values)
    table = [F(0)] + [F(2.0 ** (j - k)) if partition == "natural" else F(j) / F(k) for j in range(1, k + 1)]
    codes, back = [], []
    for i, value in enumerate(values):
        share = min(np.abs(value) / norm, F(1))
        level = next(j for j in range(k - 1, -1, -1) if j == 0 or not share < table[j])
        if partition == "linear":
            level = min(int(share * F(k)), k - 1)
        chance = (share - table[level]) / (table[level + 1] - table[level])
        level += int(random_unit(seed, i) < chance)
        codes.append(level | (int(value < 0) << (bits - 1)))
        back.append(-(norm * table[level]) if value < 0 else norm * table[level])
    per_byte = 8 // bits
    packed = bytearray(room)
    for i, one in enumerate(codes):
        packed[i // per_byte] |= one << (i % per_byte * bits)
    return norm.tobytes() + bytes(packed), np.array(back, F)


METHODS: dict[str, Callable[..., tuple[bytes, Floats]]] = {
    "bf16": bf16,
    "fp16": fp16,
    "mxfp8": mxfp8,
    "fp8": fp8,
    "int8": int8,
    "int4": int4,
    "onebit": onebit,
    "topk": topk,
    "randomk": randomk,
    "dithering": dithering,
}


def seed_of(tensor: int, partition: int, number: int, sender: int) -> int:
    """What the codec of a push draws from; the server's number as a sender is 2**32 - 1."""
    seed = 0
    for one in (tensor, partition, number, sender):
        seed = random_bits(seed + one, 0)
    return seed


def reference(text: str, values: Floats, seed: int = 0) -> tuple[bytes, Floats]:
    """The code of `values`, and what it decodes to."""
    method, _, parameters = text.partition(":")
    options: dict[str, Any] = {}
    for each in filter(None, parameters.split(",")):
        key, value = each.split("=")
        options[key] = float(value) if "." in value else int(value) if value.isdigit() else value
    return METHODS[method](values, seed, **options)
