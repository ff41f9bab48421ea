// SPDX-License-Identifier: Apache-2.0
#include "node/call_gate.h"

#include <utility>

#include "compress/codec_call.h"
#include "core/error.h"
#include "core/fork.h"
#include "van/session_end.h"

namespace bps::node {
namespace {

thread_local CallGate::Call* t_innermost = nullptr;

}  // namespace

CallGate::CallGate() : forks_(fork_count()) {}

CallGate::Call::Call(CallGate& gate) : gate_(gate), outer_(t_innermost) {
  compress::CodecCall::refuse_within();
  if (gate_.forks_ != fork_count()) {
    throw Error(ErrorCode::kNotInitialized, "this process was forked from a member of the job and is no member itself",
                "call init() here to join a job of its own");
  }
  if (const std::uint32_t state = gate_.state_.fetch_add(1); (state & kClosed) != 0) {
    gate_.leave();
    if ((state & kGoesOn) != 0) throw van::view_ended_error();
    throw Error(ErrorCode::kNotInitialized, "this process has left the job",
                "end the threads that use bps_rdma before shutdown(), or call init() again");
  }
  t_innermost = this;
}

CallGate::Call::~Call() {
  t_innermost = outer_;
  gate_.leave();
}

void CallGate::leave() {
  if ((state_.fetch_sub(1) & kClosed) == 0) return;
  std::function<void()> task;
  {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
    if ((state_.load() & kCalls) == 0) task = std::exchange(task_, nullptr);
  }
  if (task) task();
}

bool CallGate::close(After after) {
  const std::uint32_t closed = after == After::kNextView ? kClosed | kGoesOn : kClosed;
  std::uint32_t state = state_.load();
  while ((state & kClosed) == 0) {
    if (state_.compare_exchange_weak(state, state | closed)) return true;
  }
  return false;
}

std::uint32_t CallGate::own_calls() const {
  std::uint32_t own = 0;
  for (const Call* call = t_innermost; call != nullptr; call = call->outer_) own += &call->gate_ == this ? 1 : 0;
  return own;
}

void CallGate::run_when_empty(std::function<void()> task, const Deadline& deadline) {
  const std::uint32_t own = own_calls();
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline.at(), [&] { return (state_.load() & kCalls) <= own; });
    if ((state_.load() & kCalls) != 0) {
      task_ = std::move(task);
      return;
    }
  }
  task();
}

}  // namespace bps::node
