// SPDX-License-Identifier: Apache-2.0
// Lets a call from Python that waits in C++ release the GIL, and look for signals now and then.
#pragma once

#include <pybind11/pybind11.h>

#include "compress/codec_call.h"
#include "core/clock.h"
#include "core/interrupt.h"

namespace bps::python {

// Runs the signal handlers of Python that are due. Their exceptions, such as KeyboardInterrupt, end the wait.
void check_signals();

// Marks a thread in C++ that gives the GIL away, or may have to, and needs it once more. Once the interpreter ends, it
// never gets it: up to Python 3.13 the thread ends in the middle of C++, and with it the program. So the interpreter
// waits for such threads when it ends. Those that come later stay where they are, as from Python 3.14 on. The GIL is
// held.
class AwayFromPython {
 public:
  AwayFromPython();
  ~AwayFromPython();
  AwayFromPython(const AwayFromPython&) = delete;
  AwayFromPython& operator=(const AwayFromPython&) = delete;

  // Is called in the thread in which the interpreter ends.
  static void end();
  // Is called without the GIL. Does not return in another thread once end() has returned.
  static void stay_if_ended();
};

// Releases the GIL for a call that needs nothing of Python.
class WithoutGil {
 public:
  WithoutGil() = default;
  ~WithoutGil() { AwayFromPython::stay_if_ended(); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  AwayFromPython away_;
  pybind11::gil_scoped_release released_;
};

// Releases the GIL for a call that may wait. Throws Error (kInvalidArgument) within a codec of the program.
class Interruptible {
 public:
  Interruptible() { compress::CodecCall::refuse_within(); }

 private:
  WithoutGil without_;
  InterruptScope scope_{[begun = Clock::now()] {
    check_signals();
    compress::CodecCall::check_behind(begun);
  }};
};

// Returns a time-out that the caller gave, in seconds; infinity means no limit. Throws kInvalidArgument.
double checked_timeout(double seconds);

}  // namespace bps::python
