// SPDX-License-Identifier: Apache-2.0
// Gives servers other weights while the job runs. This is the scheduler's side. All ranks place each round of a tensor
// by the same weights, and no rank waits longer than a message takes to the scheduler and back:
//
//   BeginShift ->  workers start no round; each says which one would be the next, of every tensor
//   <- Rounds      of all workers
//   EndShift   ->  the links that weights follow from now on, and for each tensor the latest of its next rounds;
//                  earlier rounds are placed as before, also on ranks that have not begun them yet
//
// A shift is called off for all if a worker does not answer or has left. It is also called off if some rank has not yet
// begun a round of the shift before, so that a worker knows two placements at most. Belongs to the scheduler's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "core/clock.h"
#include "van/member_table.h"

namespace bps::van {

class Shift {
 public:
  using Tell = std::function<void(std::span<const Peer>, const Message&)>;
  using GroupOf = std::function<const Group*(std::uint32_t)>;

  Shift(MemberTable& members, Tell tell) : members_(members), tell_(std::move(tell)) {}

  bool is_open() const { return open_.has_value(); }
  // Returns how many shifts have come to their end, which numbers the weights that are in use.
  std::uint32_t done() const { return done_; }
  // Returns the links that weights follow, in bytes per second by node. The list is empty where they are as the members
  // joined.
  const std::vector<std::uint64_t>& links() const { return links_; }

  // Has no effect while a shift is open, or where a member is not here any more.
  void begin(std::vector<std::uint64_t> links, Clock::time_point now);
  // Returns false where no honest worker says this.
  bool take(const Member& worker, Rounds&& rounds, const GroupOf& group_of);
  void call_off();
  // Calls off a shift that takes too long.
  void look(Clock::time_point now);

 private:
  struct Open {
    std::vector<std::uint64_t> links;
    Clock::time_point until;
    std::vector<bool> has_answered;  // by rank
    std::uint32_t answers = 0;
    std::map<std::uint64_t, TensorRound> latest;         // by key
    std::map<std::uint64_t, std::uint32_t> ranks_after;  // how many ranks are through the shift before, by key
  };
  bool is_through(const GroupOf& group_of) const;
  void end(const GroupOf& group_of);
  void tell_workers(const Message& message);

  MemberTable& members_;
  const Tell tell_;
  std::optional<Open> open_;
  std::uint32_t number_ = 0;  // of the last shift that was begun
  std::uint32_t done_ = 0;
  std::vector<std::uint64_t> links_;
  std::vector<TensorRound> from_;  // the EndShift::from of the last shift that was done
};

}  // namespace bps::van
