# SPDX-License-Identifier: Apache-2.0
"""Says, once in a job for each reason, that a compression which was asked for has no effect on a tensor."""

from __future__ import annotations

import enum
import functools

from bps_rdma import _core
from bps_rdma.compression import Codec

COMPRESSIBLE = (_core.Dtype.float32, _core.Dtype.float16, _core.Dtype.bfloat16)
_BYTES = {_core.Dtype.float64: 8, _core.Dtype.float32: 4, _core.Dtype.float16: 2, _core.Dtype.bfloat16: 2}


class Reason(enum.Enum):
    """Why a tensor travels as it is; values of `code` and `host` are the core's words."""

    dtype = "dtype"
    size = "size"
    code = "code"
    host = "host"
    op = "op"
    sparse = "sparse"
    weights = "weights"


@functools.lru_cache(maxsize=64)
def remembers(method: str) -> bool:
    """Whether a compression keeps anything from round to round: feedback, or momentum."""
    if method in ("", "none", "exact", "exact:to_odd"):
        return False
    codec = Codec(method)
    return codec.feedback or codec.momentum != 0


def why_not(dtype: _core.Dtype, elements: int, smallest: int) -> Reason | None:
    """Why a setting, or the compression of a whole model, leaves out a tensor; None: it does not.

    Args:
        dtype, elements: of the tensor.
        smallest: bytes from which on tensors are compressed.
    """
    if elements * _BYTES.get(dtype, smallest) < smallest:
        return Reason.size
    return None if dtype in COMPRESSIBLE else Reason.dtype


class Remarks:
    """What has been said in a job: a part of it (Job.part)."""

    outlives_view = True

    def __init__(self) -> None:
        self._said: set[tuple[Reason, bool]] = set()  # with whether momentum is lost
        self._small = ""  # a tensor that was too small, while nothing is compressed
        self._applies = False
        self._has_told_of_unnamed = False

    def note_applied(self) -> None:
        """Notes that some tensor is compressed."""
        self._applies = True

    def note_unnamed(self, method: str) -> None:
        """Says, once, that tensors without a name of their own are not compressed by a method that remembers."""
        if not self._has_told_of_unnamed:
            self._has_told_of_unnamed = True
            _core.log_warning(
                f"tensors without a name of their own are not compressed by {method!r}, which remembers something of "
                "each by its name: those of collectives of torch.distributed, and of calls without a name"
            )

    def note(self, reason: Reason, name: str, method: str, dtype: _core.Dtype, elements: int, smallest: int) -> None:
        """Says that `method` does not apply to a tensor, unless that was said of another one for the same reason.

        Small tensors are what one expects, and a line at the level INFO; unless there were no others, see close(), or
        they lack the momentum that others get, which changes what is trained.
        """
        is_small = reason is Reason.size or (reason is Reason.code and elements * _BYTES[dtype] < smallest)
        loses_momentum = Codec(method).momentum != 0
        is_said = (reason, loses_momentum) in self._said
        if is_said and not is_small:
            return
        text = f"{name!r} is not compressed by {method!r}: {_explain(reason, dtype, elements, smallest)}"
        if loses_momentum:
            text += ", so it gets no momentum: leave that of such tensors to the optimizer"
        elif is_small:
            self._small = self._small or text
        if not is_said:
            self._said.add((reason, loses_momentum))
            say = _core.log_info if is_small and not loses_momentum else _core.log_warning
            say(f"{text}; this is said of the first such tensor only")

    def close(self) -> None:
        """At the end of the job: nothing was compressed, because every tensor was too small."""
        if self._small and not self._applies:
            _core.log_warning(f"{self._small}; no tensor of this job was compressed")


def _explain(reason: Reason, dtype: _core.Dtype, elements: int, smallest: int) -> str:
    size = elements * _BYTES.get(dtype, 0)
    if reason is Reason.dtype:
        return f"it is {dtype.name}, and only float32, float16 and bfloat16 can be"
    if reason is Reason.size:
        return f"its {size} bytes are fewer than BPS_MIN_COMPRESS_BYTES, {smallest}"
    if reason is Reason.code:
        return f"the code of its {size} bytes of {dtype.name} would be no shorter"
    if reason is Reason.host:
        return "its ranks and servers are on one host, and what crosses no network is compressed with everywhere=1 only"
    if reason is Reason.sparse:
        return "its gradient is sparse, and rows travel as they are"
    if reason is Reason.weights:
        return "it is a change of weights, to which momentum would add"
    return "only sums and means are"
