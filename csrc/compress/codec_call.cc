// SPDX-License-Identifier: Apache-2.0
#include "compress/codec_call.h"

#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fork.h"

namespace bps::compress {
namespace {

constexpr const char* kCallNothing =
    "call nothing of bps_rdma in encode() and decode(), nor wait there for a thread that does";

thread_local std::string t_failure;

// The calls of all threads, in the order in which they have begun.
struct Running {
  std::mutex mutex;
  std::vector<CodecCall*> calls;

  static Running& instance() {
    static auto& running = *[] {
      auto* made = new Running;  // never destroyed: loops may run until the process ends
      hold_across_fork(made->mutex);
      return made;
    }();
    return running;
  }
};

}  // namespace

thread_local CodecCall* CodecCall::t_innermost = nullptr;

CodecCall::CodecCall(const std::string& codec) : codec_(codec), outer_(std::exchange(t_innermost, this)) {
  Running& running = Running::instance();
  const std::lock_guard lock(running.mutex);
  running.calls.push_back(this);
}

CodecCall::~CodecCall() {
  t_innermost = outer_;
  Running& running = Running::instance();
  const std::lock_guard lock(running.mutex);
  std::erase(running.calls, this);
}

std::string CodecCall::describe_longest() {
  Running& running = Running::instance();
  const std::lock_guard lock(running.mutex);
  return running.calls.empty() ? "" : ", which runs the codec '" + running.calls.front()->codec_ + "',";
}

void CodecCall::refuse_behind(Duration taken) {
  Running& running = Running::instance();
  const std::lock_guard lock(running.mutex);
  for (CodecCall* const call : running.calls) call->refuses_others_ |= Clock::now() - call->begun_ >= taken;
}

void CodecCall::check_behind(Clock::time_point begun) {
  Running& running = Running::instance();
  const std::lock_guard lock(running.mutex);
  for (const CodecCall* const call : running.calls) {
    if (!call->refuses_others_ || begun < call->begun_) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        "this call waits for a loop, and the loop for the codec '" + call->codec_ + "', which may wait for this thread",
        kCallNothing);
  }
}

void CodecCall::refuse_within() {
  if (t_innermost == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the codec '" + t_innermost->codec_ + "' calls bps_rdma, which waits for that codec", kCallNothing);
}

void CodecCall::fail(std::string why) {
  if (t_failure.empty()) t_failure = std::move(why);
}

bool CodecCall::has_failed() {
  return !t_failure.empty();
}

std::string CodecCall::take_failure() {
  return std::exchange(t_failure, {});
}

}  // namespace bps::compress
