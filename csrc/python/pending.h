// SPDX-License-Identifier: Apache-2.0
// An operation in progress and the arrays that must outlive it, as handles and prepared operations hold them. All under
// the GIL, which waiting releases.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "worker/operation.h"

namespace bps::python {

// An operation, and the arrays that must stay alive until it is over.
struct PendingArrays {
  std::shared_ptr<worker::Operation> operation;
  pybind11::object source;
  pybind11::object target;
};

// Waits without the GIL until the operation is over; signal handlers that are due run meanwhile, and what they raise
// ends the wait. `abandons`: nobody can wait again after that, so the operation is given up, and its arrays are the
// caller's when the exception is raised.
void wait_for(worker::Operation& operation, bool abandons);

// Waits as wait_for() does, and then for what continues the operation in the next views, if it was suspended.
void settle(worker::Operation& operation, bool abandons);
// Throws what it has failed with in the end.
void rethrow(const worker::Operation& operation);
// True when nobody will touch its arrays again.
bool is_over(const worker::Operation& operation);

// Keeps the arrays of an operation that nobody waits for any more until it is over, when nobody can write into them.
void keep_until_over(PendingArrays arrays);
// Waits until these operations are over, but no longer than that.
void finish_kept(double timeout_s);
// Lets go of those whose operations are over; `all`: of all of them, but for what a device still copies.
void release_kept(bool all);

}  // namespace bps::python
