// SPDX-License-Identifier: Apache-2.0
// Keeps the operations of a worker that have failed and are asked for later: the last one, for people, and those in two
// phases that the next view may go on with. Any thread may call it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "worker/operation.h"

namespace bps::worker {

class FailedOperations {
 public:
  // `next` is the sequence number of the operation that will be started next.
  void add(const std::shared_ptr<Operation>& operation, std::uint64_t next);
  // Notes why an operation could not be started.
  void note_refusal(const std::string& why, std::uint64_t next);
  // Returns how the last operation failed, or why it could not be started, or "" if one was started since.
  std::string last(std::uint64_t next) const;
  // Takes those in two phases that the end of the view has aborted, and the last of those that were not complete at
  // their deadlines.
  std::vector<std::shared_ptr<Operation>> take_incomplete();

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Operation> last_;
  std::string refusal_;  // where last_ is null
  std::uint64_t failed_at_ = 0;
  std::vector<std::shared_ptr<Operation>> aborted_;
  std::deque<std::shared_ptr<Operation>> late_;
};

}  // namespace bps::worker
