// SPDX-License-Identifier: Apache-2.0
// Waits for an operation in progress, and keeps the arrays that must outlive it, for handles and prepared operations.
// The GIL is held for all of it, and waiting releases it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "worker/operation.h"

namespace bps::python {

// Holds an operation, and the arrays that must stay alive until it is over.
struct PendingArrays {
  std::shared_ptr<worker::Operation> operation;
  pybind11::object source;
  pybind11::object target;
};

// Waits without the GIL until the operation is over. Signal handlers that are due run meanwhile, and what they raise
// ends the wait. `abandons` says that nobody can wait again after that: the operation is then given up, and its arrays
// are the caller's when the exception is raised.
void wait_for(worker::Operation& operation, bool abandons);

// Ends an operation that nobody will wait for again, and returns when its arrays are the caller's. No signal handler
// runs meanwhile.
void abandon(worker::Operation& operation);

// Waits as wait_for() does, and then for what continues the operation in the next views, if it was suspended.
void settle(worker::Operation& operation, bool abandons);
// Throws what the operation has failed with in the end.
void rethrow(const worker::Operation& operation);
// Returns true while a device copies for it, or for what continues it.
bool is_copied(const worker::Operation& operation);
// Returns true when nobody will touch its arrays again.
bool is_over(const worker::Operation& operation);

// Keeps the arrays of an operation that nobody waits for any more until it is over, when nobody can write into them.
void keep_until_over(PendingArrays arrays);
// Waits until these operations are over, but no longer than `timeout_s`.
void finish_kept(double timeout_s);
// Lets go of those whose operations are over, or, if `all`, of all, except for what a device still copies.
void release_kept(bool all);

}  // namespace bps::python
