// SPDX-License-Identifier: Apache-2.0
// Keeps why an operation fails. The first reason counts, and a server may explain it. Any thread may call it.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"

namespace bps::worker {

class Failure {
 public:
  // `begins` is asked under the lock, so that a thread that sees the operation failing finds the reason. Returns false
  // when `begins` says so, or when there is a reason already.
  template <typename Begins>
  bool note(Error why, Begins begins) {
    const std::lock_guard lock(mutex_);
    if (error_ || !begins()) return false;
    error_.emplace(std::move(why));
    return true;
  }
  // Makes another reason count from now on.
  void replace(const Error& why) {
    const std::lock_guard lock(mutex_);
    error_ = why;
  }
  // Adds what a server knows of the cause. Only the first explanation counts.
  void explain(const std::string& detail) {
    const std::lock_guard lock(mutex_);
    if (!error_ || std::exchange(is_explained_, true)) return;
    error_ = Error(error_->code(), std::string(error_->what()) + ": " + detail, error_->hint());
  }
  // Returns the reason so far, or nothing.
  std::optional<Error> why() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> error_;
  bool is_explained_ = false;
};

}  // namespace bps::worker
