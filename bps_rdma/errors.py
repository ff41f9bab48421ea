# SPDX-License-Identifier: Apache-2.0
"""The exceptions of bps_rdma: one small hierarchy, each with a hint that tells what to do."""

from __future__ import annotations


class BpsError(RuntimeError):
    """Base of all errors raised by bps_rdma.

    Attributes:
        hint: what to do about it, in one sentence; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} (hint: {hint})" if hint else message)
        self.message = message
        self.hint = hint


class InvalidArgumentError(BpsError, ValueError):
    """The value of an argument or a setting cannot be used."""


class InvalidTensorError(InvalidArgumentError, TypeError):
    """An array cannot be synchronised: its dtype, layout, device or writability does not allow it."""


class MismatchError(BpsError):
    """Two ranks, or two uses of one name, differ in a tensor, an operation or the job."""


class NotInitializedError(BpsError):
    """bps_rdma was used before init() or after shutdown()."""


class UnknownHandleError(BpsError, KeyError):
    """A handle does not belong to this job, or its result has already been taken."""

    __str__ = BpsError.__str__


class PortTakenError(BpsError, OSError):
    """Another program is listening on the port of the scheduler."""


class AuthenticationError(BpsError):
    """A peer has another secret or belongs to another job."""


class VersionError(BpsError):
    """A peer uses another version of the protocol."""


class UnreachableError(BpsError, ConnectionError):
    """A member of the job cannot be reached."""


class PeerLostError(BpsError, ConnectionError):
    """A worker, server or scheduler died or stopped responding; the message names it."""


class RoundAbortedError(PeerLostError):
    """A member was lost, or has entered, and the job goes on with other members (BPS_MIN_WORKERS): repeat the step.

    Every rank gets it once for each view that ends, from what it waits for, or else from its next call. Nothing writes
    to the arrays of that call any more. From the next call on rank(), size() and the groups are those of the next view,
    in which a lost rank is missing and the ranks above it have moved up; names are declared anew, and prepared
    operations have to be prepared again. The message names the member and both views.
    """


class DeadlineError(BpsError, TimeoutError):
    """An operation did not complete in time; the message names it and the ranks that are missing."""


class TransportError(BpsError, OSError):
    """The operating system or a peer refused a resource that the transport needs."""


class InternalError(BpsError):
    """bps_rdma reached a state that should be impossible; please report it."""
