// SPDX-License-Identifier: Apache-2.0
// Gives servers other weights while the job runs, as the scheduler does it. All ranks place each round of a tensor by
// the same weights, and none waits longer than a message takes to the scheduler and back:
//
//   BeginShift ->  workers start no round; each says which one would be the next, of every tensor
//   <- Rounds      of all workers
//   EndShift   ->  the links that weights follow from now on, and for each tensor the latest of its next rounds:
//   earlier
//                  ones are placed as before, also on ranks that have not begun them yet
//
// A shift is called off, for all, while a worker does not answer, or has left; and where some rank has not yet begun a
// round of the shift before, so that a worker knows two placements at most. Belongs to the scheduler's thread.
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
  // Shifts that have come to their end: the number of the weights that are in use.
  std::uint32_t done() const { return done_; }
  // By node; empty: as they joined.
  const std::vector<std::uint64_t>& links() const { return links_; }

  // Nothing happens while one is open, or a worker is not here any more.
  void begin(std::vector<std::uint64_t> links, Clock::time_point now);
  // False: no honest worker says this.
  bool take(const Member& worker, Rounds&& rounds, const GroupOf& group_of);
  void call_off();
  // Calls off what takes too long.
  void look(Clock::time_point now);

 private:
  struct Open {
    std::vector<std::uint64_t> links;
    Clock::time_point until;
    std::vector<bool> has_answered;  // by rank
    std::uint32_t answers = 0;
    std::map<std::uint64_t, TensorRound> latest;         // by key
    std::map<std::uint64_t, std::uint32_t> ranks_after;  // ranks that are through the shift before, by key
  };
  bool is_through(const GroupOf& group_of) const;
  void end(const GroupOf& group_of);
  void tell_workers(const Message& message);

  MemberTable& members_;
  const Tell tell_;
  std::optional<Open> open_;
  std::uint32_t number_ = 0;  // of the last one that was begun
  std::uint32_t done_ = 0;
  std::vector<std::uint64_t> links_;
  std::vector<TensorRound> from_;  // of the last one that was done
};

}  // namespace bps::van
