// SPDX-License-Identifier: Apache-2.0
// Failures, lost members, and tensors that can be synchronised no more.
#include <algorithm>
#include <utility>

#include "worker/worker.h"

namespace bps::worker {
void Worker::note_failure(const std::shared_ptr<Operation>& operation) {
  const ErrorCode code = operation->failure()->code();
  if (code == ErrorCode::kNotInitialized) return;
  failed_.add(operation, sequence_.load());
  if (on_failure && code != ErrorCode::kRoundAborted) on_failure();
}

// True when the loss of a member keeps the group from summing: it belongs to it, sums for it, or may be the relay of
// ranks that do.
bool Worker::concerns(const van::Node& gone, const van::Group& group) const {
  if (gone.server_rank >= 0) return true;
  const auto rank = static_cast<std::uint32_t>(gone.worker_rank);
  if (!options_.hosts.active()) return group.index_of(rank) != van::kNoRank;
  const std::uint32_t host = options_.hosts.host_of(rank);
  return std::ranges::any_of(group.ranks, [&](std::uint32_t member) { return options_.hosts.host_of(member) == host; });
}

void Worker::check_alive(const Tensor& tensor, tensor::OperationKind kind) const {
  if (tensor.failed.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kMismatch, tensor.why_failed, "declare the tensor with the same dtype and shape everywhere");
  }
  if (!any_lost_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (why_ended_) throw Error(*why_ended_);
  for (const auto& [node, what] : lost_) {
    const van::Node* gone = van_.membership().by_id(node);
    if (gone == nullptr || concerns(*gone, *tensor.group))
      throw Error(ErrorCode::kPeerLost, "'" + tensor.name + "' cannot be synchronised: " + what, kRestartJob);
  }
  // A member may have pushed its part before it left: a push or pull on its own can still succeed.
  if (kind == tensor::OperationKind::kSplit) return;
  for (const auto& [node, what] : left_) {
    const auto rank = static_cast<std::uint32_t>(van_.membership().by_id(node)->worker_rank);
    if (tensor.group->index_of(rank) != van::kNoRank) {
      throw Error(ErrorCode::kPeerLost, "'" + tensor.name + "' cannot be synchronised: " + what, kRestartJob);
    }
  }
}

void Worker::require_alive(const Tensor& tensor, tensor::OperationKind kind) {
  try {
    check_alive(tensor, kind);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotInitialized) {
      failed_.note_refusal(error.what(), sequence_.load());
      if (on_failure) on_failure();
    }
    throw;
  }
}

void Worker::end_view(const Error& why) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(loops_know_, true)) return;
    if (!why_ended_) why_ended_ = why;  // else this process leaves, and what is under way ends by that
  }
  *view_ended_ = true;
  any_lost_.store(true);
  for (const LoopOf& each : worker_loops_) {
    each.reactor->loop().post([worker_loop = each.worker_loop, why] { worker_loop->end_view(why); });
  }
}

void Worker::lose_node(std::uint32_t node, const std::string& why) {
  const van::Node* gone = van_.membership().by_id(node);
  {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(lost_, node, [](const auto& one) { return one.first; }) != lost_.end()) return;
    lost_.emplace_back(node, why);
  }
  any_lost_.store(true);
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post([this, worker_loop = worker_loop.worker_loop, gone, node, why] {
      worker_loop->abort_operations(
          [&](const Operation& operation) { return gone == nullptr || concerns(*gone, *operation.tensor->group); },
          ErrorCode::kPeerLost, why, kRestartJob);
      worker_loop->lose_server(node, why);
    });
  }
}

// The servers decide about operations in progress, because they know what that member has contributed to.
void Worker::leave_node(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  left_.emplace_back(node, why);
  any_lost_.store(true);
}

void Worker::on_reachable(std::uint32_t node) {
  for (const LoopOf& each : worker_loops_) {
    each.reactor->loop().post([worker_loop = each.worker_loop, node] { worker_loop->on_reachable(node); });
  }
}

void Worker::mark_failed(Tensor& tensor, const std::string& why) {
  if (tensor.failed) return;
  tensor.why_failed = why;
  tensor.failed.store(true);
}

void Worker::fail_tensor(std::uint32_t id, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    mismatched_.emplace(id, why);
    for (const auto& [key, tensor] : tensors_) {
      if (tensor->id == id) mark_failed(*tensor, why);
    }
  }
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post([worker_loop = worker_loop.worker_loop, id, why] {
      worker_loop->abort_operations([&](const Operation& operation) { return operation.tensor->id == id; },
                                    ErrorCode::kMismatch, why,
                                    "declare the tensor with the same dtype and shape everywhere");
    });
  }
}

}  // namespace bps::worker
