// SPDX-License-Identifier: Apache-2.0
// Tells a worker and its tensors that the view has ended. A server may know it first. An operation that the server has
// failed then says so, before the scheduler does. Any thread may call it.
#pragma once

#include <atomic>

#include "van/session_end.h"
#include "worker/failure.h"

namespace bps::worker {

class ViewEnd {
 public:
  // Notes that the view has ended. The first reason counts.
  void note(const std::string& why) {
    (void)why_.note(van::view_ended_error(why), [] { return true; });
    is_known_.store(true);
  }
  bool is_known() const { return is_known_.load(); }
  // Returns the error of an operation that would begin now.
  Error error() const { return why_.why().value_or(van::view_ended_error()); }

 private:
  std::atomic<bool> is_known_{false};
  Failure why_;
};

}  // namespace bps::worker
