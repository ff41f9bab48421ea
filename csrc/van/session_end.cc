// SPDX-License-Identifier: Apache-2.0
#include "van/session_end.h"

#include "core/interrupt.h"

namespace bps::van {

Error view_ended_error(const std::string& why) {
  return {ErrorCode::kRoundAborted, why.empty() ? "the view has ended" : why,
          "catch RoundAbortedError and repeat the step; rank(), size() and groups are then those of the next view"};
}

void SessionEnd::set(How how, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (how_ != How::kNotYet && how_ != How::kViewEnded) return;
  how_ = how;
  why_ = why;
  changed_.notify_all();
}

SessionEnd::How SessionEnd::so_far() const {
  const std::lock_guard lock(mutex_);
  return how_;
}

SessionEnd::How SessionEnd::wait(const Deadline& deadline) const {
  std::unique_lock lock(mutex_);
  (void)wait_until(lock, changed_, deadline, [this] { return how_ != How::kNotYet; });
  return how_;
}

std::string SessionEnd::why() const {
  const std::lock_guard lock(mutex_);
  return why_;
}

// Sets the reason, too, so that a thread that sees that the view has ended also sees why.
bool SessionEnd::note_view_ended(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (view_ended_) return false;
  if (how_ == How::kNotYet) why_ = why;
  view_ended_ = true;
  return true;
}

void SessionEnd::note_loss(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (first_loss_.why.empty()) first_loss_ = {node, why};
}

SessionEnd::Loss SessionEnd::first_loss() const {
  const std::lock_guard lock(mutex_);
  return first_loss_;
}

void SessionEnd::note_scheduler_lost(const std::string& why) {
  const std::lock_guard lock(mutex_);
  why_scheduler_lost_ = why;
}

std::string SessionEnd::why_scheduler_lost() const {
  const std::lock_guard lock(mutex_);
  if (!why_scheduler_lost_.empty()) return why_scheduler_lost_;
  return how_ == How::kSchedulerLost ? why_ : "";
}

void SessionEnd::require_next_view() const {
  const std::lock_guard lock(mutex_);
  if (how_ == How::kNotYet || how_ == How::kViewEnded) return;
  const bool is_lost = how_ == How::kSchedulerLost;
  throw Error(ErrorCode::kPeerLost, why_.empty() ? "every worker has left the job" : why_,
              is_lost ? "look into the log of the scheduler" : "start the job again");
}

}  // namespace bps::van
