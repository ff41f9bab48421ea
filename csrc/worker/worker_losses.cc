// SPDX-License-Identifier: Apache-2.0
// Failures, lost members, and tensors that can be synchronised no more.
#include "worker/worker.h"

namespace bps::worker {

void Worker::note_failure(const std::shared_ptr<Operation>& operation) {
  const ErrorCode code = operation->failure()->code();
  if (code == ErrorCode::kNotInitialized) return;
  failed_.add(operation, sequence_.load());
  if (on_failure && code != ErrorCode::kRoundAborted) on_failure();
}

void Worker::check_alive(const Tensor& tensor, tensor::OperationKind kind) const {
  if (tensor.failed.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kMismatch, tensor.why_failed, kDeclareAlike);
  }
  gone_.check(tensor, kind);
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
  if (loops_know_.exchange(true)) return;
  gone_.end(why);  // if this process does not leave already: then what is under way ends by that
  *view_ended_ = true;
  shifts_.stop();
  for (const LoopOf& each : worker_loops_) {
    each.reactor->loop().post([worker_loop = each.worker_loop, why] { worker_loop->end_view(why); });
  }
}

void Worker::lose_node(std::uint32_t node, const std::string& why) {
  const van::Node* gone = van_.membership().by_id(node);
  if (!gone_.note_lost(node, why)) return;
  if (node == 0) shifts_.stop();  // of other losses the scheduler knows: it calls the shift off
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post([this, worker_loop = worker_loop.worker_loop, gone, node, why] {
      worker_loop->abort_operations(
          [&](const Operation& operation) {
            return gone == nullptr || gone_.concerns(*gone, *operation.tensor->group);
          },
          ErrorCode::kPeerLost, why, kRestartJob);
      worker_loop->lose_server(node, why);
    });
  }
}

// The servers decide about operations in progress, because they know what that member has contributed to.
void Worker::leave_node(std::uint32_t node, const std::string& why) {
  gone_.note_left(node, why);
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
                                    ErrorCode::kMismatch, why, kDeclareAlike);
    });
  }
}

}  // namespace bps::worker
