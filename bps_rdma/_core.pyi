# Generated: pybind11-stubgen bps_rdma._core. What each thing means is said in csrc/python/.
"""
The C++ core of bps_rdma. Use the functions of bps_rdma itself.
"""

from __future__ import annotations

import builtins
import collections.abc
import typing

__all__: list[str] = [
    "Config",
    "Dtype",
    "Handle",
    "Kind",
    "Memory",
    "Process",
    "ReduceOp",
    "SharedMemory",
    "Startup",
    "Tensor",
    "copy_bytes",
    "describe_array",
    "djb2",
    "local_address",
    "locked_memory_limit",
    "make_key",
    "naive",
    "rdma_report",
    "rdma_self_transfer",
    "reduce_isa",
    "release_orphans",
    "renew_block",
    "sdbm",
    "server_of",
    "when_block_gone",
]

class Config:
    """
    Every setting with its value and source; see bps_rdma.config().
    """
    @staticmethod
    def table() -> list[tuple[str, str, str, str, bool]]:
        """
        Rows of (name, aliases, default, help, secret).
        """
    def __init__(self) -> None:
        """
        Reads the environment of this process.
        """
    def check(self) -> None:
        """
        Raises InvalidArgumentError for the first value outside its range.
        """
    def integer(self, name: str) -> int: ...
    def seconds(self, name: str) -> float: ...
    def set(self, name: str, value: str, source: str = "argument") -> None: ...
    def source(self, name: str) -> str: ...
    def text(self, name: str) -> str: ...

class Dtype:
    """
    Members:

      float32

      float64

      float16

      bfloat16

      uint8

      int8

      int32

      int64

      bool
    """

    __members__: typing.ClassVar[dict[str, Dtype]]
    bfloat16: typing.ClassVar[Dtype]
    bool: typing.ClassVar[Dtype]
    float16: typing.ClassVar[Dtype]
    float32: typing.ClassVar[Dtype]
    float64: typing.ClassVar[Dtype]
    int32: typing.ClassVar[Dtype]
    int64: typing.ClassVar[Dtype]
    int8: typing.ClassVar[Dtype]
    uint8: typing.ClassVar[Dtype]
    @typing.overload
    def __eq__(self, other: Dtype) -> builtins.bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> builtins.bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Dtype) -> builtins.bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> builtins.bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ReduceOp:
    """
    Members:

      sum

      average

      min

      max

      product
    """

    __members__: typing.ClassVar[dict[str, ReduceOp]]
    average: typing.ClassVar[ReduceOp]
    max: typing.ClassVar[ReduceOp]
    min: typing.ClassVar[ReduceOp]
    product: typing.ClassVar[ReduceOp]
    sum: typing.ClassVar[ReduceOp]
    @typing.overload
    def __eq__(self, other: ReduceOp) -> builtins.bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> builtins.bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: ReduceOp) -> builtins.bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> builtins.bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Kind:
    """
    Members:

      push_pull

      reduce_scatter

      all_gather

      broadcast

      split
    """

    __members__: typing.ClassVar[dict[str, Kind]]
    all_gather: typing.ClassVar[Kind]
    broadcast: typing.ClassVar[Kind]
    push_pull: typing.ClassVar[Kind]
    reduce_scatter: typing.ClassVar[Kind]
    split: typing.ClassVar[Kind]
    @typing.overload
    def __eq__(self, other: Kind) -> builtins.bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> builtins.bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Kind) -> builtins.bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> builtins.bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class SharedMemory:
    """
    Bytes that peers on this host can map.
    """
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __init__(self, size: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        `size` zeroed bytes; at least 1.
        """
    @property
    def address(self) -> int: ...

class Memory:
    """
    The bytes of an array, and the block of memory around it.
    """
    def __init__(
        self,
        keep: typing.Any,
        address: typing.SupportsInt | typing.SupportsIndex,
        elements: typing.SupportsInt | typing.SupportsIndex,
        nbytes: typing.SupportsInt | typing.SupportsIndex,
        dtype: Dtype,
        owner: typing.Any,
        block: typing.SupportsInt | typing.SupportsIndex,
        block_nbytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        keep: the array; owner: whose life is that of the block.
        """
    @property
    def address(self) -> int: ...
    @property
    def block(self) -> tuple[int, int, int]:
        """
        Address, bytes, and the number that no other block ever has.
        """
    @property
    def dtype(self) -> Dtype: ...
    @property
    def elements(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """
        As given, for people.
        """

class Handle:
    """
    One asynchronous operation. Take its result with `synchronize(handle)`, `handle.wait()` or `await handle`: once. The array belongs to the operation until then.
    """
    def __await__(self) -> typing.Any: ...
    def __repr__(self) -> str: ...
    def completion_fd(self) -> int:
        """
        Readable once the operation is over.
        """
    def done(self) -> bool:
        """
        Whether wait() would return (or raise) at once.
        """
    def wait(self) -> typing.Any:
        """
        Blocks until the operation is over, without holding the GIL, and returns its array.

        Raises:
            UnknownHandleError: the result has been taken before.
            PeerLostError, DeadlineError, MismatchError, ...: what became of the operation.
        """
    @property
    def taken(self) -> bool:
        """
        Whether the result has been taken.
        """

class Tensor:
    """
    A declared name.
    """
    def fits(self, memory: Memory, elements: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether `elements` of the dtype of `memory` are what was declared.
        """
    @property
    def bytes(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def member(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def partitions(self) -> int: ...
    @property
    def server_bytes(self) -> list[int]:
        """
        Bytes of push_pull by [loop of this worker x loop of a server].
        """

class Startup:
    """
    Who this process is in the job.
    """

    hosts_scheduler: bool
    job: str
    joint: bool
    scheduler_host: str
    secret: str
    def __init__(self) -> None: ...
    @property
    def processes_on_host(self) -> int: ...
    @processes_on_host.setter
    def processes_on_host(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def scheduler_ports(self) -> list[int]: ...
    @scheduler_ports.setter
    def scheduler_ports(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None: ...
    @property
    def server_rank(self) -> int: ...
    @server_rank.setter
    def server_rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def servers(self) -> int: ...
    @servers.setter
    def servers(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def worker_rank(self) -> int: ...
    @worker_rank.setter
    def worker_rank(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def workers(self) -> int: ...
    @workers.setter
    def workers(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Process:
    """
    This process as a member of a job.
    """
    @staticmethod
    def start(config: Config, startup: Startup) -> Process: ...
    def barrier(
        self, group: typing.SupportsInt | typing.SupportsIndex, timeout_s: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...
    def declare(
        self,
        tensors: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, str, Dtype, typing.SupportsInt | typing.SupportsIndex, str]
        ],
    ) -> list[Tensor]:
        """
        tensors: (group, name, dtype, count, shape) each.
        """
    def describe(self) -> list[str]: ...
    def forget_memory(self, identity: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def metrics(self) -> list[tuple[str, int]]: ...
    def new_group(
        self,
        ranks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        name: str,
        timeout_s: typing.SupportsFloat | typing.SupportsIndex,
    ) -> int: ...
    def shutdown(self, timeout_s: typing.SupportsFloat | typing.SupportsIndex) -> bool: ...
    def start_operation(
        self,
        tensor: Tensor,
        kind: Kind,
        op: ReduceOp,
        source: Memory,
        target: Memory,
        result: typing.Any,
        pushes: bool,
        pulls: bool,
        root: typing.SupportsInt | typing.SupportsIndex,
        priority: typing.SupportsInt | typing.SupportsIndex,
        awaited: bool,
        timeout_s: typing.SupportsFloat | typing.SupportsIndex | None = None,
    ) -> Handle:
        """
        awaited: the caller waits next. timeout_s: None is the job's.
        """
    def wait_for_end(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def routes(self) -> list[str]: ...
    @property
    def servers(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def workers(self) -> int: ...

def copy_bytes(
    to: typing.SupportsInt | typing.SupportsIndex,
    from_: typing.SupportsInt | typing.SupportsIndex,
    size: typing.SupportsInt | typing.SupportsIndex,
) -> None: ...
def describe_array(array: typing.Any, writable: bool) -> Memory | None:
    """
    The memory of a numpy array; None for anything that is not one or cannot be used as it is.
    """

def djb2(key: typing.SupportsInt | typing.SupportsIndex) -> int: ...
def local_address(config: Config, towards: str) -> str:
    """
    The address of this host that its peers should use; without settings, that of the route to `towards`.
    """

def locked_memory_limit() -> int | None:
    """
    Bytes that this process may lock, or None for no limit.
    """

def make_key(
    tensor: typing.SupportsInt | typing.SupportsIndex, partition: typing.SupportsInt | typing.SupportsIndex
) -> int: ...
def naive(key: typing.SupportsInt | typing.SupportsIndex) -> int: ...
def rdma_report(config: Config) -> dict[str, typing.Any]:
    """
    Devices, ports and GIDs, and the rails that these settings choose.
    """

def rdma_self_transfer(
    config: Config,
    rail: typing.SupportsInt | typing.SupportsIndex,
    bytes: typing.SupportsInt | typing.SupportsIndex,
    timeout_s: typing.SupportsFloat | typing.SupportsIndex,
) -> dict[str, typing.Any]:
    """
    Sends `bytes` bytes to this process over the NIC and compares them.
    """

def reduce_isa() -> str:
    """
    Instruction set of the reducer on this machine.
    """

def release_orphans(all: bool) -> None:
    """
    Lets go of the arrays of handles that were dropped, if their operations are over; `all`: in any case.
    """

def renew_block(identity: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    The memory of a block is other memory from now on: its next use is that of a new block.
    """

def sdbm(key: typing.SupportsInt | typing.SupportsIndex) -> int: ...
def server_of(
    hash: str,
    servers: typing.SupportsInt | typing.SupportsIndex,
    workers: typing.SupportsInt | typing.SupportsIndex,
    tensor: typing.SupportsInt | typing.SupportsIndex,
    partition: typing.SupportsInt | typing.SupportsIndex,
) -> int: ...
def when_block_gone(listener: collections.abc.Callable[[int], None]) -> None:
    """
    Calls `listener` with the identity of each block that is gone from now on.
    """

__version__: str = "0.1.0"
