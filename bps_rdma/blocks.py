"""Blocks of memory, told apart although addresses are used again.

A card that was told of a block goes on reading and writing its pages after it has been freed, also when its addresses
belong to another array by then. So a block has a number that no other block ever gets, and losing it is told.

Of an array or tensor that moves its memory (numpy's `resize` refuses to, for what has been used here) the next use is
a new block. What is not seen is memory that was given up and taken back between two uses, at the same address and of
the same size, by the same tensor storage.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A block of memory: address and size in bytes, and the number that no other block ever has."""

    address: int
    nbytes: int
    identity: int


class _Known(NamedTuple):
    owner: weakref.ref[Any]
    block: Block


_known: dict[int, _Known] = {}  # by id() of the owner
_lock = threading.RLock()  # collecting garbage can lose an owner at any point, in here as well
_identities = itertools.count(1)
_listeners: list[Callable[[int], None]] = []


def when_gone(listener: Callable[[int], None]) -> None:
    """Calls `listener` with the identity of each block from the moment when it is gone."""
    _listeners.append(listener)


def _tell(identity: int) -> None:
    for listener in _listeners:
        listener(identity)


def block_of(owner: Any, address: int, nbytes: int) -> Block:
    """The block that lives as long as `owner` (which can be referred to weakly) and has not moved or grown."""
    key = id(owner)
    known = _known.get(key)  # the way of all calls but the first
    if known is not None and known.owner() is owner and known.block[:2] == (address, nbytes):
        return known.block

    def gone(owner: object) -> None:
        with _lock:
            latest = _known.get(key)
            if latest is None or latest.owner is not owner:
                return
            del _known[key]
        _tell(latest.block.identity)

    with _lock:
        known = _known.get(key)
        if known is not None and known.owner() is owner:
            if known.block[:2] == (address, nbytes):
                return known.block
            _tell(known.block.identity)
        block = Block(address, nbytes, next(_identities))
        _known[key] = _Known(weakref.ref(owner, gone), block)
    return block
