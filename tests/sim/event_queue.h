// SPDX-License-Identifier: Apache-2.0
// What is going to happen, in the order of virtual time; of equal times in the order in which it was planned.
#pragma once

#include <functional>
#include <map>
#include <utility>

#include "virtual_clock.h"

namespace bps::sim {

class EventQueue {
 public:
  EventQueue() { set_time(now_); }
  Time now() const { return now_; }
  std::uint64_t ran() const { return ran_; }

  void at(Time when, std::function<void()> what) {
    events_.emplace(std::pair(std::max(when, now_), planned_++), std::move(what));
  }
  void after(Duration delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }

  // False when nothing is left to happen.
  bool run_next() {
    if (events_.empty()) return false;
    ++ran_;
    auto next = events_.extract(events_.begin());
    now_ = next.key().first;
    set_time(now_);
    next.mapped()();
    return true;
  }

 private:
  // Not at zero, which some fields take for "never".
  Time now_{std::chrono::hours(1)};
  std::uint64_t planned_ = 0;
  std::uint64_t ran_ = 0;
  std::map<std::pair<Time, std::uint64_t>, std::function<void()>> events_;
};

}  // namespace bps::sim
