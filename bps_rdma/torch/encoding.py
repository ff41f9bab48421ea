# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes, in an encoding that cannot run code: the reader makes values of the types below only.

None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, set, frozenset, torch.Size,
torch.dtype, torch.device, tensors and parameters, numpy arrays and numbers. JSON holds the structure; values that JSON
does not know are objects with one key, their type. Bytes and values of arrays follow the JSON.

On the wire: the length of the JSON (8 bytes, little-endian), the JSON, all bytes one after the other.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import torch

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch.transfer.flat_bytes import flat_bytes

_LENGTH_BYTES = 8
_ARRAY_KINDS = "biufcmMSU"  # numpy's kinds but Python objects and records
_PLAIN = frozenset([type(None), bool, int, float, str])  # JSON has its own forms of these

MakeTensor = Callable[[int, torch.dtype, tuple[int, ...], str], torch.Tensor]


class Encoder:
    """Encodes one object.

    Args:
        tensors_beside: values of dense tensors are left out; `tensors` then has these tensors, each once.
        allow_pickle: objects of other types are pickled, and can only be read with allow_pickle.
    """

    def __init__(self, *, tensors_beside: bool = False, allow_pickle: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        self._beside = tensors_beside
        self._allow_pickle = allow_pickle
        self._places: dict[int, int] = {}
        self._blobs: list[Any] = []
        self._size = 0

    def write(self, obj: Any, file: IO[bytes]) -> None:
        """Writes `obj` into `file`.

        Raises:
            InvalidArgumentError: it contains a value of another type, or itself.
        """
        try:
            text = json.dumps(self._encode(obj), separators=(",", ":")).encode()
        except RecursionError as error:
            raise InvalidArgumentError("an object that contains itself, or is nested too deeply, cannot be sent",
                                       "send it in parts") from error  # fmt: skip
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for blob in self._blobs:
            file.write(blob)

    def _encode(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return obj
        if kind is list:
            return [self._encode(item) for item in obj]
        if kind in (tuple, set, frozenset, torch.Size):
            return {kind.__name__: [self._encode(item) for item in obj]}
        if kind in (dict, OrderedDict):
            pairs = [[self._encode(key), self._encode(value)] for key, value in obj.items()]
            # The attribute that state_dict() of a module carries besides.
            more = self._encode(getattr(obj, "_metadata", None)) if kind is OrderedDict else None
            return {kind.__name__: [pairs, more]}
        if kind in (bytes, bytearray):
            return {kind.__name__: self._blob(obj)}
        if kind is complex:
            return {"complex": [obj.real, obj.imag]}
        if kind in (torch.dtype, torch.device):
            return {kind.__name__: str(obj).removeprefix("torch.")}
        if kind is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return {"Tensor": self._tensor(obj)}
        if kind is torch.nn.Parameter:
            return {"Parameter": [self._encode(obj.data), obj.requires_grad]}
        if (kind is np.ndarray or isinstance(obj, np.generic)) and obj.dtype.kind in _ARRAY_KINDS:
            name = "ndarray" if kind is np.ndarray else "generic"
            return {name: [obj.dtype.str, list(obj.shape), self._blob(obj.tobytes())]}
        if self._allow_pickle:
            return {"pickle": self._blob(pickle.dumps(obj, protocol=5))}
        raise InvalidArgumentError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent: objects may consist of numbers, strings, bytes, "
            "lists, tuples, dicts, sets, dense tensors and numpy arrays",
            "convert it to these; or pass allow_pickle=True on all ranks, where reading an object may run code",
        )

    def _blob(self, data: bytes | bytearray) -> list[int]:
        place = [self._size, len(data)]
        self._blobs.append(data)
        self._size += len(data)
        return place

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        about = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]
        if not self._beside:
            plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
            return [*about, self._blob(flat_bytes(plain).numpy().tobytes() if plain.numel() else b"")]
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return [*about, place]


def decode(data: memoryview, rank: int, make_tensor: MakeTensor | None = None, *, allow_pickle: bool = False) -> Any:
    """The object that worker `rank` has encoded.

    Args:
        data: what Encoder.write() wrote.
        rank: for errors.
        make_tensor: gives the tensor of this number, dtype, shape and type of device, if values of tensors were left
            out.
        allow_pickle: reads values that were pickled, which may run code.

    Raises:
        InvalidArgumentError: the bytes are not an encoded object, or contain a pickled one and this is not allowed.
    """
    try:
        return _Decoder(data, make_tensor, allow_pickle=allow_pickle).read()
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"the object of worker {rank}: {error.message}", error.hint) from error
    except Exception as error:
        raise InvalidArgumentError(
            f"the object of worker {rank} cannot be read here: {type(error).__name__}: {error}",
            "use the same versions of bps_rdma and torch on all ranks; define pickled classes in a module that every "
            "rank can import",
        ) from error


class _Decoder:
    def __init__(self, data: memoryview, make_tensor: MakeTensor | None, *, allow_pickle: bool) -> None:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        self._text = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
        self._blobs = data[_LENGTH_BYTES + length :]
        self._make_tensor = make_tensor
        self._allow_pickle = allow_pickle
        # Everything that a message can make.
        self._types: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda items: tuple(self._decode_all(items)),
            "set": lambda items: set(self._decode_all(items)),
            "frozenset": lambda items: frozenset(self._decode_all(items)),
            "Size": lambda items: torch.Size(self._decode_all(items)),
            "dict": lambda parts: dict(self._decode_all(pair) for pair in parts[0]),
            "OrderedDict": self._ordered_dict,
            "bytes": lambda place: bytes(self._blob(place)),
            "bytearray": lambda place: bytearray(self._blob(place)),
            "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
            "dtype": _dtype,
            "device": lambda name: torch.device(str(name)),
            "Tensor": self._tensor,
            "Parameter": lambda parts: torch.nn.Parameter(self.decode(parts[0]), requires_grad=bool(parts[1])),
            "ndarray": self._array,
            "generic": lambda parts: self._array(parts)[()],
            "pickle": self._pickled,
        }

    def read(self) -> Any:
        return self.decode(json.loads(bytes(self._text)))

    def decode(self, value: Any) -> Any:
        if type(value) is list:
            return self._decode_all(value)
        if type(value) is not dict:
            return value
        ((name, content),) = value.items()
        return self._types[name](content)

    def _decode_all(self, values: Any) -> list[Any]:
        return [self.decode(value) for value in values]

    def _blob(self, place: Any) -> memoryview:
        begin, size = place
        if begin < 0 or size < 0 or begin + size > len(self._blobs):
            raise ValueError("bytes beyond the end of the message")
        return self._blobs[begin : begin + size]

    def _ordered_dict(self, parts: Any) -> OrderedDict[Any, Any]:
        pairs, more = parts
        made: Any = OrderedDict(self._decode_all(pair) for pair in pairs)
        if more is not None:
            made._metadata = self.decode(more)
        return made  # type: ignore[no-any-return]

    def _array(self, parts: Any) -> np.ndarray[Any, Any]:
        name, shape, place = parts
        dtype = np.dtype(str(name))
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"an array of {name}")
        return np.frombuffer(self._blob(place), dtype=dtype).reshape(_shape(shape)).copy()

    def _tensor(self, parts: Any) -> torch.Tensor:
        name, dims, device, place = parts
        dtype, shape = _dtype(name), _shape(dims)
        if self._make_tensor is not None:
            return self._make_tensor(place, dtype, shape, str(device))
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        blob = self._blob(place)
        if len(blob) != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor of another size")
        if len(blob):
            flat_bytes(tensor).numpy()[:] = np.frombuffer(blob, np.uint8)
        return tensor.to(device)

    def _pickled(self, place: Any) -> Any:
        if not self._allow_pickle:
            raise InvalidArgumentError(
                "it contains a pickled value, which could run code when it is read",
                "pass allow_pickle=True on all ranks if all members of the job may run code on each other",
            )
        return pickle.loads(self._blob(place))  # noqa: S301 - the caller asked for it


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name}")
    return found


def _shape(dims: Any) -> tuple[int, ...]:
    shape = tuple(dims)
    if not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ValueError(f"{shape} is not a shape")
    return shape
