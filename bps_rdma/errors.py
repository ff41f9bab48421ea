"""The exceptions of bps_rdma: one small hierarchy, each with a hint that is an action."""

from __future__ import annotations


class BpsError(RuntimeError):
    """Base of all errors raised by bps_rdma.

    Attributes:
        hint: what to do about it, one sentence; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} (hint: {hint})" if hint else message)
        self.message = message
        self.hint = hint


class InvalidArgumentError(BpsError, ValueError):
    """An argument or a setting has a value that cannot be used."""


class InvalidTensorError(InvalidArgumentError, TypeError):
    """An array cannot be synchronised: its dtype, layout, device or writability does not allow it."""


class MismatchError(BpsError):
    """Ranks, or two uses of one name, disagree about a tensor, an operation or the job."""


class NotInitializedError(BpsError):
    """bps_rdma is used before init() or after shutdown()."""


class UnknownHandleError(BpsError, KeyError):
    """A handle is not one of this job's, or its result has already been taken."""

    __str__ = BpsError.__str__


class PortTakenError(BpsError, OSError):
    """Another program listens on the port of the scheduler."""


class AuthenticationError(BpsError):
    """The other side has another secret or belongs to another job."""


class VersionError(BpsError):
    """The other side speaks another version of the protocol."""


class UnreachableError(BpsError, ConnectionError):
    """A member of the job cannot be reached."""


class PeerLostError(BpsError, ConnectionError):
    """A worker, server or scheduler died or went silent; the message names it."""


class DeadlineError(BpsError, TimeoutError):
    """Something did not happen within its deadline; the message says what, and who is missing."""


class TransportError(BpsError, OSError):
    """The operating system or a peer refused something that the transport needs."""


class InternalError(BpsError):
    """A state that should be impossible; please report it."""
