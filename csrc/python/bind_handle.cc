// SPDX-License-Identifier: Apache-2.0
// Binds handles: operations in progress, and the arrays that must outlive them.
#include "python/handle.h"

#include "python/bind.h"
#include "python/errors.h"
#include "python/hooks.h"

namespace py = pybind11;

namespace bps::python {

Handle::Handle(std::shared_ptr<worker::Operation> operation, py::object result, py::object source, py::object target)
    : pending_{std::move(operation), std::move(source), std::move(target)}, result_(std::move(result)) {
  release_kept(false);
}

Handle::~Handle() {
  worker::Operation& operation = *pending_.operation;
  if (operation.completion.is_over()) operation.completion.close_descriptor();
  if (operation.request.awaited && !taken_ && !operation.completion.is_given_up()) give_up();
  if (!is_over(*pending_.operation)) keep_until_over(std::move(pending_));
}

void Handle::give_up() {
  if (!is_over(*pending_.operation)) abandon(*pending_.operation);
}

void Handle::check_not_taken() const {
  if (!taken_) return;
  throw Error(ErrorCode::kUnknownHandle, "the result of this handle has been taken before", "wait for a handle once");
}

py::object Handle::wait() {
  check_not_taken();
  if (forks_ != fork_count()) {
    throw Error(ErrorCode::kNotInitialized,
                "this process was forked while " + pending_.operation->describe() + " was in progress in its parent",
                "wait for handles in the process that made them");
  }
  worker::Operation& operation = *pending_.operation;
  // Nobody can wait for the handle of a synchronous call again.
  settle(operation, operation.request.awaited);
  check_not_taken();  // another thread may have taken it while this one waited without the GIL
  taken_ = true;
  py::object result = std::move(result_);
  if (is_copied(operation)) {
    keep_until_over({pending_.operation, std::move(pending_.source), std::move(pending_.target)});
  }
  pending_.source = pending_.target = py::object();
  try {
    rethrow(operation);
  } catch (const Error& error) {
    taken_ = set_python_error(error);  // what a signal handler raised is no result: the error comes at the next wait
    throw py::error_already_set();
  }
  return result;
}

std::string Handle::describe() const {
  const char* state = taken_ ? "taken" : done() ? "done" : "pending";
  return "<Handle of " + pending_.operation->describe() + ", " + state + ">";
}

void bind_handle(py::module_& module) {
  py::class_<Handle>(
      module, "Handle",
      "One asynchronous operation. Take its result with `synchronize(handle)`, `handle.wait()` or `await "
      "handle`: once. The array belongs to the operation until then.")
      .def("done", &Handle::done,
           "Whether wait() would return (or raise) at once. Where the operation's server was lost, it is done, too, "
           "and wait() "
           "then follows it into the next view.")
      .def("wait", &Handle::wait,
           "Blocks until the operation is over, without holding the GIL, and returns its array.\n\n"
           "Raises:\n"
           "    UnknownHandleError: the result has been taken before.\n"
           "    PeerLostError, DeadlineError, MismatchError, ...: what became of the operation.")
      .def("__await__", [](const py::object& self) { return hooks().awaiting(self); })
      .def("completion_fd", &Handle::completion_fd, "Readable once the operation is over.")
      .def_property_readonly("taken", &Handle::taken, "Whether the result has been taken.")
      .def("__repr__", &Handle::describe);
  module.def("give_up", &Handle::give_up, py::arg("handle"),
             "Ends the operation of a handle, with an error unless it is complete. Its array is the caller's then.");
  module.def("finish_orphans", &finish_kept, py::arg("timeout"),
             "Waits for the operations of handles that were dropped, without holding the GIL; for `timeout` seconds.");
  module.def("release_orphans", &release_kept, py::arg("all"),
             "Lets go of the arrays of handles that were dropped, if their operations are over; `all`: in any case.");
}

}  // namespace bps::python
