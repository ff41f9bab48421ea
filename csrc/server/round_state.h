// SPDX-License-Identifier: Apache-2.0
// Says how far a round is, by a state machine that docs/notes/operations.md draws.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "core/error.h"
#include "core/state.h"

namespace bps::server {

enum class RoundPhase : std::uint8_t {
  kOpen,          // pushes are missing
  kGathered,      // all have come and are not summed: the round may have to wait for memory, or for the redo log
  kHeld,          // an addition is made, and its rank has to wait for slower ones
  kContributed,   // the contribution of a host is with the servers
  kHostProposed,  // of a host, in two phases: its ranks get the result, and the servers have not committed it
  kProposed,      // in two phases: the result goes to the members, and not all of them have it
  kAnswered,      // the result is final: members get it when they ask
  kFailed,        // there is no result, and members learn of that when they come
};
constexpr const char* name_of(RoundPhase) {
  return "a round";
}
constexpr std::array<std::uint16_t, 8> arrows_of(RoundPhase) {
  return {
      arrows_to(RoundPhase::kGathered, RoundPhase::kFailed),
      arrows_to(RoundPhase::kHeld, RoundPhase::kContributed, RoundPhase::kProposed, RoundPhase::kAnswered,
                RoundPhase::kFailed),
      arrows_to(RoundPhase::kAnswered, RoundPhase::kFailed),
      arrows_to(RoundPhase::kHostProposed, RoundPhase::kProposed, RoundPhase::kAnswered, RoundPhase::kFailed),
      arrows_to(RoundPhase::kAnswered, RoundPhase::kFailed),
      arrows_to(RoundPhase::kAnswered, RoundPhase::kFailed),
      arrows_to(),
      arrows_to(),
  };
}

class RoundState {
 public:
  RoundPhase phase() const { return phase_.now(); }
  bool is(RoundPhase phase) const { return phase_.is(phase); }
  bool is_with_servers() const { return phase_.is_between(RoundPhase::kContributed, RoundPhase::kHostProposed); }
  // Returns true when the result is known, although in two phases it may still be lost.
  bool is_summed() const { return phase_.is_between(RoundPhase::kHostProposed, RoundPhase::kAnswered); }

  // Enters any phase but those that fail() and hold() enter.
  void enter(RoundPhase next) { phase_.enter(next); }
  void fail(const Error& why) {
    phase_.enter(RoundPhase::kFailed);
    failure_ = std::make_unique<const Error>(why);
  }
  // `additions` counts those of its rank, this one included.
  void hold(std::uint64_t additions) {
    phase_.enter(RoundPhase::kHeld);
    held_at_ = additions;
  }
  const Error& failure() const { return *failure_; }  // of kFailed
  std::uint64_t held_at() const { return held_at_; }  // of kHeld

 private:
  State<RoundPhase> phase_;
  std::uint64_t held_at_ = 0;
  std::unique_ptr<const Error> failure_;
};

}  // namespace bps::server
