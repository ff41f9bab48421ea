// SPDX-License-Identifier: Apache-2.0
#include "worker/failed_operations.h"

#include <utility>

namespace bps::worker {
namespace {

// The last ones are enough if deadlines pass over and over: another rank is not further behind than that.
constexpr std::size_t kMostLate = 256;

}  // namespace

void FailedOperations::add(const std::shared_ptr<Operation>& operation, std::uint64_t next) {
  const std::lock_guard lock(mutex_);
  last_ = operation;
  failed_at_ = next;
  if (!operation->request.survives_servers) return;
  const ErrorCode code = operation->failure()->code();
  if (code == ErrorCode::kRoundAborted) aborted_.push_back(operation);  // its caller waits for the next view
  if (code != ErrorCode::kTimeout) return;
  if (late_.size() == kMostLate) late_.pop_front();
  late_.push_back(operation);
}

void FailedOperations::note_refusal(const std::string& why, std::uint64_t next) {
  const std::lock_guard lock(mutex_);
  last_.reset();
  refusal_ = why;
  failed_at_ = next;
}

std::string FailedOperations::last(std::uint64_t next) const {
  const std::lock_guard lock(mutex_);
  if (failed_at_ != next) return "";
  return last_ ? last_->failure()->what() : refusal_;
}

std::vector<std::shared_ptr<Operation>> FailedOperations::take_incomplete() {
  const std::lock_guard lock(mutex_);
  auto taken = std::exchange(aborted_, {});
  const auto late = std::exchange(late_, {});
  taken.insert(taken.end(), late.begin(), late.end());
  return taken;
}

}  // namespace bps::worker
