// SPDX-License-Identifier: Apache-2.0
// What a call from Python does while it waits in C++: it releases the GIL, and looks for signals now and then.
#pragma once

#include <pybind11/pybind11.h>

#include "core/clock.h"
#include "core/interrupt.h"

namespace bps::python {

// Runs the signal handlers of Python that are due; their exceptions, such as KeyboardInterrupt, end the wait.
void check_signals();

// A thread that is in C++, or on its way back: it may not have the GIL, and needs it once more. The interpreter must
// not end before it has got it: it would end such a thread in the middle of C++, and with it the program.
class AwayFromPython {
 public:
  AwayFromPython();   // with the GIL
  ~AwayFromPython();  // with the GIL
  AwayFromPython(const AwayFromPython&) = delete;
  AwayFromPython& operator=(const AwayFromPython&) = delete;

  // Without the GIL: waits until only the calling thread is away, or for the deadline.
  static void await_others(const Deadline& deadline);
};

// For the time of a call that may wait.
class Interruptible {
 private:
  AwayFromPython away_;
  pybind11::gil_scoped_release released_;
  InterruptScope scope_{check_signals};
};

// A time-out that the caller gave, in seconds; infinity means no limit. Throws kInvalidArgument.
double checked_timeout(double seconds);

}  // namespace bps::python
