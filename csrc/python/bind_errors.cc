// SPDX-License-Identifier: Apache-2.0
// Raises an Error as the class of bps_rdma.errors that stands for its code, with .hint set.
#include "python/errors.h"

#include "python/bind.h"
#include "python/hooks.h"
#include "python/interruptible.h"

namespace py = pybind11;

namespace bps::python {
namespace {

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "InvalidArgumentError";
    case ErrorCode::kMismatch: return "MismatchError";
    case ErrorCode::kNotInitialized: return "NotInitializedError";
    case ErrorCode::kUnknownHandle: return "UnknownHandleError";
    case ErrorCode::kPortTaken: return "PortTakenError";
    case ErrorCode::kAuthentication: return "AuthenticationError";
    case ErrorCode::kVersion: return "VersionError";
    case ErrorCode::kUnreachable: return "UnreachableError";
    case ErrorCode::kPeerLost: return "PeerLostError";
    case ErrorCode::kTimeout: return "DeadlineError";
    case ErrorCode::kTransport: return "TransportError";
    case ErrorCode::kInternal: return "InternalError";
    case ErrorCode::kRoundAborted: return "RoundAbortedError";
  }
  return "BpsError";
}

}  // namespace

bool set_python_error(const Error& error) {
  const AwayFromPython away;  // a constructor in Python may have to give the GIL away
  try {
    const py::object type = py::module_::import("bps_rdma.errors").attr(class_of(error.code()));
    const py::object value = type(error.what(), error.hint());
    // The caller knows from here on that the view has ended.
    if (error.code() == ErrorCode::kRoundAborted) hooks().note_view_end();
    PyErr_SetObject(type.ptr(), value.ptr());
    return true;
  } catch (py::error_already_set& raised) {  // a signal handler may have raised this
    raised.restore();
    return false;
  }
}

void bind_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const Error& error) {
      (void)set_python_error(error);
    }
  });
}

}  // namespace bps::python
