// SPDX-License-Identifier: Apache-2.0
#include "core/interrupt.h"

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

namespace bps {
namespace {

thread_local InterruptScope* t_innermost = nullptr;

}  // namespace

InterruptScope::InterruptScope(std::function<void()> check)
    : check_(std::move(check)), outer_(std::exchange(t_innermost, this)) {}

InterruptScope::~InterruptScope() {
  t_innermost = outer_;
}

void check_interrupt() {
  for (const InterruptScope* scope = t_innermost; scope != nullptr; scope = scope->outer_) scope->check_();
}

Clock::time_point end_of_slice(const Deadline& deadline) {
  return t_innermost == nullptr ? deadline.at() : std::min(deadline.at(), Clock::now() + kWaitSlice);
}

int poll_until(pollfd& descriptor, const Deadline& deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_of_slice(deadline) - Clock::now()).count();
    const int ready = ::poll(&descriptor, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000)));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return ready;
    check_interrupt();
    if (deadline.passed()) return 0;
  }
}

void sleep_until(const Deadline& deadline) {
  while (!deadline.passed()) {
    std::this_thread::sleep_until(end_of_slice(deadline));
    check_interrupt();
  }
}

}  // namespace bps
