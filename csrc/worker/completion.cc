// SPDX-License-Identifier: Apache-2.0
#include "worker/completion.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#include "core/error.h"
#include "core/fd.h"

namespace bps::worker {
namespace {

template <typename State>
long futex(const std::atomic<State>* word, int what, std::uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<State>) == sizeof(std::uint32_t));
  return ::syscall(SYS_futex, word, what | FUTEX_PRIVATE_FLAG, value, timeout, nullptr, 0);
}

}  // namespace

Completion::~Completion() {
  close_descriptor();
}

void Completion::close_descriptor() {
  if (const int descriptor = descriptor_.exchange(-1); descriptor >= 0) ::close(descriptor);
}

bool Completion::is_reusable() const {
  return is_over() && state_.load(std::memory_order_acquire) == State::kComplete && !is_given_up();
}

bool Completion::begin_failing() {
  State expected = State::kPending;
  return state_.compare_exchange_strong(expected, State::kFailing, std::memory_order_acq_rel);
}

void Completion::mark_incomplete() {
  Missing expected = Missing::kNothing;
  (void)missing_.compare_exchange_strong(expected, Missing::kAnswer, std::memory_order_relaxed);
}

// A thread that begins to fail the operation at this moment either comes before this or finds it done.
bool Completion::settle() {
  State seen = state_.load();
  State next;
  do {
    if (is_end(seen)) return false;
    next = is_incomplete() ? State::kFailed : seen == State::kFailing ? State::kCompleteAnyway : State::kComplete;
  } while (!state_.compare_exchange_weak(seen, next));
  return true;
}

void Completion::end() {
  if (settle()) {
    if (sleepers_.load() > 0) futex(&state_, FUTEX_WAKE, INT_MAX, nullptr);
    if (progress) progress->call_back();
    if (const int descriptor = descriptor_.load(); descriptor >= 0) ring(descriptor);
  }
  is_over_.store(true, std::memory_order_release);
}

void Completion::restart() {
  if (const int descriptor = descriptor_.load(); descriptor >= 0) (void)take_rings(descriptor);
  state_.store(State::kPending, std::memory_order_release);
  is_over_.store(false, std::memory_order_release);
}

bool Completion::wait(const Deadline& deadline) const {
  while (!is_done()) {
    const int left = deadline.left_ms();
    if (left == 0) break;
    (void)wait_briefly(left);
  }
  return is_done();
}

bool Completion::wait_briefly(int milliseconds) const {
  if (is_done()) return true;
  if (progress) {
    using Outcome = transport::ProgressLock::Outcome;
    const Outcome outcome =
        progress->progress_until([this] { return is_done(); }, std::chrono::milliseconds(milliseconds));
    if (outcome != Outcome::kElsewhere) return outcome == Outcome::kDone;
  }
  sleepers_.fetch_add(1);
  if (const State seen = state_.load(); !is_end(seen)) {
    const timespec timeout{.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1'000'000L};
    futex(&state_, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &timeout);
  }
  sleepers_.fetch_sub(1);
  return is_done();
}

int Completion::descriptor() {
  int known = descriptor_.load();
  if (known >= 0) return known;
  const int made = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (made < 0) throw_errno("cannot create an eventfd");
  if (!descriptor_.compare_exchange_strong(known, made)) {
    ::close(made);
    return known;
  }
  if (is_done()) ring(made);  // it may have ended before it could see the descriptor
  return made;
}

}  // namespace bps::worker
