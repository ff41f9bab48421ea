// SPDX-License-Identifier: Apache-2.0
// What a call from Python does while it waits in C++: it releases the GIL, and looks for signals now and then.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <string>

#include "core/error.h"
#include "core/interrupt.h"

namespace bps::python {

// Runs the signal handlers of Python that are due; their exceptions, such as KeyboardInterrupt, end the wait.
inline void check_signals() {
  const pybind11::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// For the time of a call that may wait.
class Interruptible {
 private:
  pybind11::gil_scoped_release released_;
  InterruptScope scope_{check_signals};
};

// A time-out that the caller gave, in seconds; infinity means no limit.
inline double checked_timeout(double seconds) {
  if (seconds >= 0) return seconds;
  throw Error(ErrorCode::kInvalidArgument,
              std::isnan(seconds) ? "timeout is not a number" : "timeout is negative: " + std::to_string(seconds),
              "pass seconds, or float('inf') for no limit");
}

}  // namespace bps::python
