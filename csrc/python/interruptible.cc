// SPDX-License-Identifier: Apache-2.0
#include "python/interruptible.h"

#include <cmath>
#include <condition_variable>
#include <mutex>
#include <string>

#include "core/error.h"
#include "core/fork.h"

namespace py = pybind11;

namespace bps::python {
namespace {

// Threads of which a forked process has only one.
struct Threads {
  std::mutex mutex;
  std::condition_variable changed;
  int away = 0;

  static Threads& instance() {
    static auto& threads = *[] {
      auto* made = new Threads;  // never destroyed: threads may come back after static destruction
      hold_across_fork(made->mutex);
      after_fork_in_child([] { instance().away = t_own; });
      return made;
    }();
    return threads;
  }
  static thread_local int t_own;  // of `away`: calls of this thread within each other
};
thread_local int Threads::t_own = 0;

}  // namespace

void check_signals() {
  const py::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

AwayFromPython::AwayFromPython() {
  Threads& threads = Threads::instance();
  const std::lock_guard lock(threads.mutex);
  ++threads.away;
  ++Threads::t_own;
}

AwayFromPython::~AwayFromPython() {
  Threads& threads = Threads::instance();
  const std::lock_guard lock(threads.mutex);
  --threads.away;
  --Threads::t_own;
  threads.changed.notify_all();
}

void AwayFromPython::await_others(const Deadline& deadline) {
  Threads& threads = Threads::instance();
  std::unique_lock lock(threads.mutex);
  threads.changed.wait_until(lock, deadline.at(), [&] { return threads.away == Threads::t_own; });
}

double checked_timeout(double seconds) {
  if (seconds >= 0) return seconds;
  throw Error(ErrorCode::kInvalidArgument,
              std::isnan(seconds) ? "timeout is not a number" : "timeout is negative: " + std::to_string(seconds),
              "pass seconds, or float('inf') for no limit");
}

}  // namespace bps::python
