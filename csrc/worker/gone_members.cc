// SPDX-License-Identifier: Apache-2.0
#include "worker/gone_members.h"

#include <algorithm>

namespace bps::worker {

void GoneMembers::end(const Error& why) {
  const std::lock_guard lock(mutex_);
  if (!why_ended_) why_ended_ = why;
  is_any_.store(true);
}

bool GoneMembers::note_lost(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (std::ranges::find(lost_, node, [](const auto& one) { return one.first; }) != lost_.end()) return false;
  lost_.emplace_back(node, why);
  is_any_.store(true);
  return true;
}

void GoneMembers::note_left(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  left_.emplace_back(node, why);
  is_any_.store(true);
}

bool GoneMembers::concerns(const van::Node& gone, const van::Group& group) const {
  if (gone.server_rank >= 0) return true;
  const auto rank = static_cast<std::uint32_t>(gone.worker_rank);
  if (!hosts_.active()) return group.index_of(rank) != van::kNoRank;
  const std::uint32_t host = hosts_.host_of(rank);
  return std::ranges::any_of(group.ranks, [&](std::uint32_t each) { return hosts_.host_of(each) == host; });
}

void GoneMembers::check_lost(const Tensor& tensor) const {
  if (!is_any_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (why_ended_) throw Error(*why_ended_);
  if (tensor.bytes == 0) return;  // a member that is gone may have done the same before: nobody waits for anybody
  for (const auto& [node, what] : lost_) {
    const van::Node* gone = van_.membership().by_id(node);
    if (gone == nullptr || concerns(*gone, *tensor.group))
      throw Error(ErrorCode::kPeerLost, "'" + tensor.name + "' cannot be synchronised: " + what, kRestartJob);
  }
}

void GoneMembers::check(const Tensor& tensor, tensor::OperationKind kind) const {
  if (!is_any_.load(std::memory_order_acquire)) return;
  check_lost(tensor);
  const std::lock_guard lock(mutex_);
  // A member may have pushed its part before it left: a push or pull on its own can still succeed.
  if (kind == tensor::OperationKind::kSplit || tensor.bytes == 0) return;
  for (const auto& [node, what] : left_) {
    const auto rank = static_cast<std::uint32_t>(van_.membership().by_id(node)->worker_rank);
    if (tensor.group->index_of(rank) != van::kNoRank) {
      throw Error(ErrorCode::kPeerLost, "'" + tensor.name + "' cannot be synchronised: " + what, kRestartJob);
    }
  }
}

}  // namespace bps::worker
