// SPDX-License-Identifier: Apache-2.0
// The state of a server that a loop loses: from the broken connection to the moment when nothing of the server can come
// any more.
//
//   kOpen -> kReported -> kKnown -> kEnding -> kGone
//   kOpen or kReported -> kClosed -> kGone
//
// Of these steps the first ones may be left out: docs/internals.md has the diagram. Threading: the loop's.
#pragma once

#include <cassert>
#include <cstdint>
#include <string>
#include <utility>

#include "core/clock.h"

namespace bps::worker {

class ServerLoss {
 public:
  // The job has been asked for the cause. A connection that is not closed yet leads to a process of this host, which
  // may still write to our memory.
  void report() {
    assert(state_ == State::kOpen || state_ == State::kReported);
    state_ = State::kReported;
  }
  bool is_reported() const { return state_ == State::kReported || state_ == State::kClosed; }

  // `why` is a sentence that names the cause. The server may end by itself for a while.
  void learn(std::string why) {
    assert(!is_known());
    why_ = std::move(why);
    state_ = is_closed() ? State::kGone : State::kKnown;
    until_ = Deadline::after(kEndsItself_s);
  }
  // The cause is known.
  bool is_known() const { return state_ >= State::kKnown; }
  const std::string& why() const { return why_; }

  // The server's process is being ended.
  void note_ending() {
    assert(!is_closed());
    state_ = State::kEnding;
    until_ = Deadline::after(kEnds_s);
  }
  bool is_ending() const { return state_ == State::kEnding; }
  // It has had its time to end, by itself or otherwise.
  bool is_due() const { return until_.passed(); }

  // The connection is closed: from now on nothing of the server comes in, and nothing is sent.
  void close() { state_ = is_known() ? State::kGone : State::kClosed; }
  bool is_closed() const { return state_ == State::kClosed || state_ == State::kGone; }

 private:
  enum class State : std::uint8_t {
    kOpen,
    kReported,  // the connection is broken, and the cause is awaited
    kClosed,    // the same, and the connection is closed
    kKnown,     // the cause is known; the server may still write to our memory, and ends by itself or not
    kEnding,    // its process is being ended
    kGone,      // the connection is closed, and what was under way by it has ended or is ending now
  };
  // How long a server that is lost to the job, but still maps our memory, may take to write no more.
  static constexpr double kEndsItself_s = 1;
  // A process that is ended for longer is held by the kernel, and runs no code any more.
  static constexpr double kEnds_s = 2;

  State state_ = State::kOpen;
  std::string why_;                      // from kKnown on
  Deadline until_ = Deadline::after(0);  // kKnown, kEnding
};

}  // namespace bps::worker
