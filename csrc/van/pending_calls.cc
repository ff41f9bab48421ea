// SPDX-License-Identifier: Apache-2.0
#include "van/pending_calls.h"

#include <map>
#include <utility>

#include "core/interrupt.h"

namespace bps::van {
namespace {

const Failed kClosed{.call = 0,
                     .code = ErrorCode::kNotInitialized,
                     .text = "this process has left the job",
                     .hint = "end the threads that use bps_rdma before shutdown(), or call init() again"};

}  // namespace

PendingCalls::Call::Call(PendingCalls& calls, std::string what) : calls_(calls), what_(std::move(what)), number_(0) {
  const std::lock_guard lock(calls_.mutex_);
  if (calls_.closed_) throw Error(kClosed.code, kClosed.text, kClosed.hint);
  do {
    number_ = ++calls_.last_number_;
  } while (number_ == 0 || !calls_.waiting_.try_emplace(number_, this).second);
}

PendingCalls::Call::Call(PendingCalls& calls, std::string what, std::uint32_t number)
    : calls_(calls), what_(std::move(what)), number_(number) {
  const std::lock_guard lock(calls_.mutex_);
  calls_.waiting_[number_] = this;
}

PendingCalls::Call::~Call() {
  const std::lock_guard lock(calls_.mutex_);
  calls_.waiting_.erase(number_);
}

std::optional<Message> PendingCalls::Call::wait(const Deadline& deadline) {
  std::unique_lock lock(calls_.mutex_);
  (void)wait_until(lock, answered_, deadline, [this] { return answer_ || calls_.broken_; });
  if (!answer_) {
    if (!calls_.broken_) return std::nullopt;
    throw Error(*calls_.broken_);
  }
  if (const auto* failed = std::get_if<Failed>(&*answer_)) throw Error(failed->code, failed->text, failed->hint);
  if (const auto* refused = std::get_if<Refused>(&*answer_)) throw Error(refused->code, refused->text, refused->hint);
  return std::move(answer_);
}

void PendingCalls::answer(std::uint32_t number, Message&& message) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(number);
  if (found == waiting_.end() || found->second->answer_) return;  // its caller gave up
  found->second->answer_ = std::move(message);
  found->second->answered_.notify_one();  // under the lock: the call may vanish as soon as it is released
}

void PendingCalls::break_all(const Error& why) {
  const std::lock_guard lock(mutex_);
  broken_ = why;
  for (const auto& [number, call] : waiting_) call->answered_.notify_one();
}

void PendingCalls::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& [number, call] : waiting_) {
    if (!call->answer_) call->answer_ = kClosed;
    call->answered_.notify_one();
  }
}

std::vector<WaitingCall> PendingCalls::list() {
  const auto now = Clock::now();
  std::vector<WaitingCall> found;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, call] : waiting_) {
    const auto since = std::chrono::duration_cast<std::chrono::milliseconds>(now - call->since_).count();
    found.push_back({call->what_, since});
  }
  return found;
}

void PendingCalls::Call::note(const Message& request) {
  const std::lock_guard lock(calls_.mutex_);
  request_ = request;
}

std::vector<Message> PendingCalls::requests() {
  const std::lock_guard lock(mutex_);
  std::map<std::uint32_t, const Call*> sorted(waiting_.begin(), waiting_.end());
  std::vector<Message> found;
  for (const auto& [number, call] : sorted) {
    if (call->request_ && !call->answer_) found.push_back(*call->request_);
  }
  return found;
}

std::optional<Message> PendingCalls::request(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(number);
  return found == waiting_.end() ? std::nullopt : found->second->request_;
}

void PendingCalls::reset() {
  const std::lock_guard lock(mutex_);
  broken_.reset();
}

}  // namespace bps::van
