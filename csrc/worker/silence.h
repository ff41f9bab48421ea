// SPDX-License-Identifier: Apache-2.0
// Judges the silence of a server that owes a reply and says nothing, although its connection is open.
//
// judge() is asked at regular intervals and says what to do. The scheduler, which hears the server by another
// connection, is asked what a silence means before the limit is reached. docs/notes/members.md has the diagram. Belongs
// to the loop's thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "core/clock.h"

namespace bps::worker {

class Silence {
 public:
  enum class Verdict : std::uint8_t {
    kNothing,
    kPing,           // ask the server for a sign of life
    kPingAndReport,  // as kPing, and ask the scheduler, once for each silence
    kLost,           // the server, or the network to it, is gone
  };

  // A silent server that owes a reply is pinged after this time, which is shorter than a process may be stopped.
  static constexpr auto kPingAfter = std::chrono::milliseconds(500);

  explicit Silence(double limit_s) : limit_(to_duration(limit_s)) {}

  void note_word() { has_spoken_ = true; }
  // `owes_reply` says that the server has something to say. `was_stopped` says that this process was stopped itself,
  // and cannot tell.
  Verdict judge(Clock::time_point now, bool owes_reply, bool was_stopped) {
    if (std::exchange(has_spoken_, false) || was_stopped || !owes_reply) {
      since_ = now;
      state_ = State::kUnreported;
    }
    if (length(now) < kPingAfter) return Verdict::kNothing;
    if (is_expected(now)) return Verdict::kPing;
    if (length(now) > limit_ || state_ == State::kReachable) return Verdict::kLost;
    if (state_ != State::kUnreported || length(now) <= kReportAfter) return Verdict::kPing;
    state_ = State::kReported;
    return Verdict::kPingAndReport;
  }
  Duration length(Clock::time_point now) const { return now - since_; }

  // Notes that the scheduler still hears a server that was reported. So the network is cut, unless the server was
  // stopped for a while and speaks up now. Where its whole machine was stopped, TCP repeats what that has missed: at
  // the latest after as much time again as has passed since the first attempt.
  void note_reachable(Clock::time_point now) {
    if (state_ == State::kUnreported) return;
    state_ = State::kReachable;
    expected_until_ = now + std::max<Duration>(kPingAfter, length(now));
  }
  // Returns true while a reachable server still has time to speak up.
  bool is_expected(Clock::time_point now) const { return state_ == State::kReachable && now < expected_until_; }

 private:
  enum class State : std::uint8_t { kUnreported, kReported, kReachable };
  static constexpr auto kReportAfter = std::chrono::milliseconds(2000);

  const Duration limit_;
  State state_ = State::kUnreported;
  bool has_spoken_ = true;  // since judge() was asked last
  Clock::time_point since_{};
  Clock::time_point expected_until_{};  // in kReachable: when the server must have spoken up
};

}  // namespace bps::worker
