// SPDX-License-Identifier: Apache-2.0
// Keeps why an operation fails. The first reason counts, and a server may explain it. Any thread may call it.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"

namespace bps::worker {

inline constexpr const char* kInterrupted = "its caller was interrupted";
inline constexpr const char* kCallAgain = "call it again on every rank of the group";

// Returns what an operation fails with that a rank has given up in an earlier view, which has told the others why.
inline Error given_up_elsewhere(const std::string& operation, const std::string& why) {
  if (why == kInterrupted) return {ErrorCode::kPeerLost, operation + why, kCallAgain};
  return {ErrorCode::kTimeout, operation + why, kRaiseTimeout};
}

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
