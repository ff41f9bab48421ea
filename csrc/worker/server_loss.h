// SPDX-License-Identifier: Apache-2.0
// Keeps the state of a server that a loop loses, from the broken connection to the moment when nothing of the server
// can come any more. docs/notes/members.md has the diagram. Belongs to the loop's thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/state.h"

namespace bps::worker {

enum class LossState : std::uint8_t {
  kOpen,
  kReported,  // the connection is broken, and the cause is awaited
  kClosed,    // as kReported, and the connection is closed
  kKnown,     // the cause is known; the server may still write to our memory, and ends by itself or not
  kEnding,    // its process is being ended
  kGone,      // the connection is closed, and what was under way by it has ended or is ending now
};
constexpr const char* name_of(LossState) {
  return "the loss of a server";
}
constexpr std::array<std::uint16_t, 6> arrows_of(LossState) {
  return {
      arrows_to(LossState::kReported, LossState::kClosed, LossState::kKnown, LossState::kEnding),
      arrows_to(LossState::kClosed, LossState::kKnown, LossState::kEnding),
      arrows_to(LossState::kGone),
      arrows_to(LossState::kEnding, LossState::kGone),
      arrows_to(LossState::kGone),
      arrows_to(),
  };
}

class ServerLoss {
 public:
  // Notes that the job has been asked for the cause, perhaps once more. A connection that is not closed yet leads to a
  // process of this host, which may still write to our memory.
  void report() {
    if (!state_.is(LossState::kReported)) state_.enter(LossState::kReported);
  }
  bool is_reported() const { return state_.is_between(LossState::kReported, LossState::kClosed); }

  // Notes the cause; `why` is a sentence that names it. From now on the server has a while to end by itself.
  void learn(std::string why) {
    state_.enter(is_closed() ? LossState::kGone : LossState::kKnown);
    why_ = std::move(why);
    until_ = Deadline::after(kEndsItself_s);
  }
  bool is_known() const { return state_.is_between(LossState::kKnown, LossState::kGone); }
  const std::string& why() const { return why_; }

  void note_ending() {
    state_.enter(LossState::kEnding);
    until_ = Deadline::after(kEnds_s);
  }
  bool is_ending() const { return state_.is(LossState::kEnding); }
  // Returns true when the server has had its time to end, by itself or otherwise.
  bool is_due() const { return until_.passed(); }

  // Notes that the connection is closed: from now on nothing of the server comes in, and nothing is sent.
  void close() { state_.enter(is_known() ? LossState::kGone : LossState::kClosed); }
  bool is_closed() const { return state_.is(LossState::kClosed) || state_.is(LossState::kGone); }

 private:
  // A server that is lost to the job, but still maps our memory, may go on writing for so many seconds.
  static constexpr double kEndsItself_s = 1;
  // A process that is ended for longer is held by the kernel, and runs no code any more.
  static constexpr double kEnds_s = 2;

  State<LossState> state_;
  std::string why_;                      // from kKnown on
  Deadline until_ = Deadline::after(0);  // of kKnown and kEnding: when the server has had its time
};

}  // namespace bps::worker
