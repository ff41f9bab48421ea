# SPDX-License-Identifier: Apache-2.0
"""The errors of a job on Ray, and the choice of the failure that caused the others."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import ray.exceptions

from bps_rdma.errors import BpsError, DeadlineError, PeerLostError

# The words by which gloo and torch's store tell that a peer has gone.
_LOST_PEER = ("closed by peer", "Connection reset", "Broken pipe", "Connection refused", "recvValue failed")


class RayError(BpsError):
    """Base of the errors of bps_rdma.ray."""


class PlacementError(RayError):
    """The cluster has no room for the job; the message says what was asked for and what there is."""


class StartError(RayError):
    """Some members of the job did not start; the message names them and says why."""


class JobFailedError(RayError):
    """The job ended before all ranks had returned. `__cause__` is the exception of the first failure, if it has one.

    Attributes:
        failures: of the last attempt: the cause first, then what followed from it.
    """

    def __init__(self, message: str, hint: str = "", failures: Sequence[Failure] = ()) -> None:
        super().__init__(message, hint)
        self.failures = list(failures)


class ServerEndedError(RayError):
    """A `bps-server` or `bps-scheduler` ended while it was needed."""

    def __init__(self, message: str, *, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed

    def __reduce__(self) -> tuple[object, ...]:
        return _server_ended, (self.message, self.killed)


def _server_ended(message: str, killed: bool) -> ServerEndedError:
    return ServerEndedError(message, killed=killed)


class Kind(enum.IntEnum):
    """The way in which a member ended; the lower one of two is the cause of the other."""

    RAISED = 0  # an exception of its own
    DIED = 1
    LOST_PEER = 2  # an exception that tells of the end of another member


@dataclass(frozen=True)
class Failure:
    """The end of one member: `member` is such as "rank 1" or "server 0", `where` its host and process."""

    member: str
    where: str
    error: BaseException

    @property
    def cause(self) -> BaseException:
        """The exception as the member raised it, without Ray's wrapping."""
        wrapped = getattr(self.error, "cause", None)
        return wrapped if isinstance(wrapped, BaseException) else self.error

    @property
    def kind(self) -> Kind:
        """See Kind."""
        cause = self.cause
        if isinstance(cause, ServerEndedError):
            return Kind.DIED if cause.killed else Kind.LOST_PEER
        if isinstance(cause, (PeerLostError, DeadlineError)):
            return Kind.LOST_PEER
        if not isinstance(self.error, ray.exceptions.RayTaskError):
            return Kind.DIED
        if isinstance(cause, (RuntimeError, OSError)) and any(sign in str(cause) for sign in _LOST_PEER):
            return Kind.LOST_PEER
        return Kind.RAISED

    def describe(self) -> str:
        """Describes the failure, as in `rank 1 (pid 77 on 10.0.0.2) raised ValueError: no such sample`."""
        if not isinstance(self.error, ray.exceptions.RayTaskError):
            return f"{self.member} ({self.where}) died: {_first_line(self.error)}"
        if isinstance(self.cause, ServerEndedError):
            return f"{self.member} ({self.where}): {self.cause.message}"
        return f"{self.member} ({self.where}) raised {type(self.cause).__name__}: {_first_line(self.cause)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
