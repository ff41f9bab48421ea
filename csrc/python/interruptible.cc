// SPDX-License-Identifier: Apache-2.0
#include "python/interruptible.h"

#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/clock.h"
#include "core/error.h"
#include "core/fork.h"

namespace py = pybind11;

namespace bps::python {
namespace {

constexpr double kReturn_s = 2;  // lets threads come back to Python when the interpreter ends

// Counts threads that are away from Python. A process that was forked has only one thread.
struct Threads {
  std::mutex mutex;
  std::condition_variable changed;
  int away = 0;
  std::optional<std::thread::id> ending;  // the thread in which the interpreter ends

  static Threads& instance() {
    static auto& threads = *[] {
      auto* made = new Threads;  // is never destroyed: threads may come back after static destruction
      hold_across_fork(made->mutex);
      after_fork_in_child([] { instance().away = t_own; });
      return made;
    }();
    return threads;
  }
  bool leaves() {
    const std::lock_guard lock(mutex);
    if (is_over()) return false;
    ++away;
    ++t_own;
    return true;
  }
  bool is_late() {
    const std::lock_guard lock(mutex);
    return is_over();
  }
  bool is_over() const { return ending && *ending != std::this_thread::get_id(); }  // the caller holds `mutex`

  static thread_local int t_own;  // the part of `away` that is this thread's: its calls within each other
};
thread_local int Threads::t_own = 0;

[[noreturn]] void stay() {
  for (;;) ::pause();
}

}  // namespace

void check_signals() {
  const py::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

AwayFromPython::AwayFromPython() {
  if (Threads::instance().leaves()) return;
  const py::gil_scoped_release released;
  stay();
}

AwayFromPython::~AwayFromPython() {
  Threads& threads = Threads::instance();
  const std::lock_guard lock(threads.mutex);
  --threads.away;
  --Threads::t_own;
  threads.changed.notify_all();
}

void AwayFromPython::end() {
  const py::gil_scoped_release released;
  Threads& threads = Threads::instance();
  std::unique_lock lock(threads.mutex);
  threads.changed.wait_until(lock, Deadline::after(kReturn_s).at(), [&] { return threads.away == Threads::t_own; });
  threads.ending = std::this_thread::get_id();
}

void AwayFromPython::stay_if_ended() {
  if (Threads::instance().is_late()) stay();
}

double checked_timeout(double seconds) {
  if (seconds >= 0) return seconds;
  throw Error(ErrorCode::kInvalidArgument,
              std::isnan(seconds) ? "timeout is not a number" : "timeout is negative: " + std::to_string(seconds),
              "pass seconds, or float('inf') for no limit");
}

}  // namespace bps::python
