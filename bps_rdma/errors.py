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
    """An argument or a setting has a value that cannot be used.

    What to do: The hint names the allowed values.
    """


class InvalidTensorError(InvalidArgumentError, TypeError):
    """An array cannot be synchronised: wrong dtype, device or layout, or read-only memory in an in-place call.

    What to do: Use `.cpu()`, `.contiguous()`, or the out-of-place form.
    """


class MismatchError(BpsError):
    """Ranks, or two uses of one name, disagree about dtype, size or operation; or processes of a job about a setting.

    What to do: Use one name for one tensor, the same on all ranks; set the setting alike.
    """


class NotInitializedError(BpsError):
    """A call before init(), after shutdown(), while another thread shuts down, or in a forked process.

    What to do: Call `init()` first.
    """


class UnknownHandleError(BpsError, KeyError):
    """A value is not a handle of this job, or its result has already been taken.

    What to do: Synchronise each handle once.
    """

    __str__ = BpsError.__str__


class PortTakenError(BpsError, OSError):
    """Another program listens on the scheduler's port, or others on all ports of `BPS_PORTS`.

    What to do: Choose another `BPS_ROOT_PORT`, or a larger range.
    """


class AuthenticationError(BpsError):
    """A peer has another secret or belongs to another job, or to another run of it.

    What to do: Set the same `BPS_SECRET` or `BPS_SECRET_FILE`, and the same `BPS_JOB_ID`, everywhere; end processes
    that are left over.
    """


class VersionError(BpsError):
    """A peer speaks another version of the protocol.

    What to do: Install the same version everywhere.
    """


class UnreachableError(BpsError, ConnectionError):
    """The scheduler or a server cannot be reached.

    What to do: Check that it runs, `BPS_ROOT_URI`, and the firewall.
    """


class PeerLostError(BpsError, ConnectionError):
    """A worker, server or scheduler died, stopped answering, ended with an exception, or left too early.

    What to do: Start again from the last checkpoint, and read the log of the peer that the message names.
    """


class RoundAbortedError(PeerLostError):
    """A member was lost, or has entered, and the job goes on with other members (BPS_MIN_WORKERS).

    Every rank gets it once for each view that ends, from what it waits for, or else from its next call. Nothing writes
    to the arrays of that call any more. From the next call on rank(), size() and the groups are those of the next view,
    in which a lost rank is missing and the ranks above it have moved up; names are declared anew, and prepared
    operations have to be prepared again. The message names the member and both views.

    What to do: Repeat the step; docs/elastic.md shows how.
    """


class RefusedError(BpsError):
    """A rank could not send all of its gradients, because its backward has failed: no rank has means of this step.

    What to do: Zero the gradients, and repeat the step or go on with the next one; that rank does the same.
    """


class DeadlineError(BpsError, TimeoutError):
    """Something did not happen in time; the message names the peers that are missing.

    What to do: Start the missing ranks, or raise `BPS_TIMEOUT` or `BPS_JOIN_TIMEOUT`.
    """


class TransportError(BpsError, OSError):
    """The system or a peer refused a resource that the transport needs.

    What to do: The hint names the resource.
    """


class InternalError(BpsError):
    """The library reached a state that should be impossible.

    What to do: Report it.
    """
