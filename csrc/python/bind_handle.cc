// SPDX-License-Identifier: Apache-2.0
// Handles: operations in progress, and the arrays that must outlive them.
#include <algorithm>
#include <optional>

#include "python/bind.h"
#include "python/handle.h"
#include "python/interruptible.h"

namespace py = pybind11;

namespace bps::python {
namespace {

constexpr double kSlice_s = std::chrono::duration<double>(kWaitSlice).count();
// The core aborts every operation at its deadline, and then waits for servers to acknowledge that, or fences them.
constexpr double kGrace_s = 60.0;

// Arrays of handles that were dropped too early. They go when nobody can write into them any more.
class Orphans {
 public:
  static Orphans& instance() {
    static auto& orphans = *[] {
      auto* made = new Orphans;  // never destroyed: Python objects may not be, so late
      hold_across_fork(made->mutex_);
      return made;
    }();
    return orphans;
  }
  void adopt(PendingArrays arrays) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(arrays));
    any_.store(true, std::memory_order_relaxed);
  }
  void release(bool all) {
    if (!any_.load(std::memory_order_relaxed)) return;
    std::vector<PendingArrays> over;  // destroyed after the lock is gone: an array's end may run any code
    const std::lock_guard lock(mutex_);
    const auto keep = [&](const PendingArrays& arrays) { return !all && !arrays.operation->done(); };
    const auto first = std::stable_partition(all_.begin(), all_.end(), keep);
    std::move(first, all_.end(), std::back_inserter(over));
    all_.erase(first, all_.end());
    any_.store(!all_.empty(), std::memory_order_relaxed);
  }

 private:
  std::mutex mutex_;
  std::vector<PendingArrays> all_;
  std::atomic<bool> any_{false};
};

// Most operations end within the first slice, without a look at the clock.
bool wait_interruptibly(const worker::Operation& operation, double timeout_s) {
  std::optional<Deadline> deadline;
  for (;;) {
    {
      const py::gil_scoped_release released;
      const double left = deadline ? deadline->left_ms() / 1e3 : timeout_s;
      if (operation.wait_briefly(static_cast<int>(std::clamp(left, 0.0, kSlice_s) * 1e3))) return true;
    }
    if (!deadline) deadline = Deadline::after(timeout_s - std::min(timeout_s, kSlice_s));
    check_signals();
    if (deadline->passed()) return operation.done();
  }
}

}  // namespace

Handle::Handle(std::shared_ptr<worker::Operation> operation, py::object result, py::object source, py::object target)
    : pending_{std::move(operation), std::move(source), std::move(target)}, result_(std::move(result)) {
  Orphans::instance().release(false);
}

Handle::~Handle() {
  if (!pending_.operation->done()) Orphans::instance().adopt(std::move(pending_));
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
  bool over = false;
  try {
    over = wait_interruptibly(operation, operation.request.timeout_s + kGrace_s);
  } catch (...) {
    // Nobody can wait for the handle of a synchronous call again: its array is the caller's when this is raised.
    if (operation.request.awaited) {
      operation.give_up();
      const py::gil_scoped_release released;
      (void)operation.wait(Deadline::after(kGrace_s));
    }
    throw;
  }
  if (!over) {
    throw Error(ErrorCode::kTimeout, operation.describe() + " is stuck", "report this as a bug");
  }
  check_not_taken();  // by another thread, while this one waited without the GIL
  taken_ = true;
  py::object result = std::move(result_);
  pending_.source = pending_.target = py::object();
  operation.rethrow();
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
      .def("done", &Handle::done, "Whether wait() would return (or raise) at once.")
      .def("wait", &Handle::wait,
           "Blocks until the operation is over, without holding the GIL, and returns its array.\n\n"
           "Raises:\n"
           "    UnknownHandleError: the result has been taken before.\n"
           "    PeerLostError, DeadlineError, MismatchError, ...: what became of the operation.")
      .def("__await__",
           [](const py::object& self) { return py::module_::import("bps_rdma.handle").attr("awaiting")(self); })
      .def("completion_fd", &Handle::completion_fd, "Readable once the operation is over.")
      .def_property_readonly("taken", &Handle::taken, "Whether the result has been taken.")
      .def("__repr__", &Handle::describe);
  module.def(
      "release_orphans", [](bool all) { Orphans::instance().release(all); }, py::arg("all"),
      "Lets go of the arrays of handles that were dropped, if their operations are over; `all`: in any case.");
}

}  // namespace bps::python
