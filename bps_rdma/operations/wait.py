# SPDX-License-Identifier: Apache-2.0
"""Waiting for operations by their handles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bps_rdma.errors import UnknownHandleError
from bps_rdma.handle import Handle, PreparedOperation, PythonHandle

AnyHandle = Handle | PreparedOperation | PythonHandle


def poll(pending: AnyHandle) -> bool:
    """Whether the operation is over, with a result or with an error.

    Raises:
        UnknownHandleError: not a handle, or its result has been taken.
    """
    return _checked(pending).done()


def synchronize(pending: AnyHandle) -> Any:
    """Waits for the operation and returns its array; see Handle.wait()."""
    return _checked(pending).wait()


def wait(pending: Iterable[AnyHandle]) -> list[Any]:
    """Waits for several operations and returns their arrays, in order. Raises the first error after all are over."""
    if not isinstance(pending, Iterable):
        raise UnknownHandleError(f"{pending!r} is not a list of handles", "pass a list, or one handle to synchronize()")
    results: list[Any] = []
    error: Exception | None = None
    for one in pending:
        try:
            results.append(_checked(one).wait())
        except Exception as caught:
            error = error or caught
    if error is not None:
        raise error
    return results


def _checked(pending: object) -> AnyHandle:
    if not isinstance(pending, (Handle, PreparedOperation, PythonHandle)):
        raise UnknownHandleError(f"{pending!r} is not a handle", "pass what push_pull_async() returned")
    if pending.taken:
        raise UnknownHandleError("the result of this handle has been taken before", "wait for a handle once")
    return pending
