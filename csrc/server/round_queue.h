// SPDX-License-Identifier: Apache-2.0
// Queues the rounds that wait for the next step of their loop, for memory or because workers are out of slots.
//
// Ranks may push in any order. When every worker that a round still waits for has used up its slots on other rounds,
// nothing would ever move again. Exactly then each of those workers is granted one slot beyond its window. So memory is
// bounded by the windows unless the orders really differ, and then grows by what they differ. What an endpoint calls
// never grows the pool of slots; a round that lacks one waits here. Each round waits once. Belongs to the server loop's
// thread.
#pragma once

#include <utility>
#include <vector>

#include "core/metrics.h"
#include "server/round_groups.h"
#include "server/slot_pool.h"

namespace bps::server {

class RoundQueue {
 public:
  RoundQueue(SlotPool& pool, const RoundGroups& groups, Counters& counters)
      : pool_(pool), groups_(groups), counters_(counters) {}

  void add(Round& round) {
    if (!std::exchange(round.is_queued, true)) rounds_.push_back(&round);
  }
  // Returns true when everyone that this round waits for is out of slots, so that none of them can push.
  bool is_starved(const Round& round) const;
  // Notes that a worker has filled its last slot. It may be the one that an open round waits for.
  void note_empty_window() { has_empty_window_ = true; }

  void add_starved(const std::vector<Round*>& open);
  // Gives access to the rounds, to add some that come from another line and are marked as queued already.
  std::vector<Round*>& rounds() { return rounds_; }
  // Returns the next round, which then waits no more, or nullptr when none waits.
  Round* next();
  // Makes what the round has waited for: slots for its result and for payloads that were posted in place, or for the
  // workers. Throws if there is no memory.
  void provide(const Round& round);

 private:
  SlotPool& pool_;
  const RoundGroups& groups_;
  Counters& counters_;
  std::vector<Round*> rounds_;  // some may have been closed meanwhile
  std::size_t next_ = 0;
  bool has_empty_window_ = false;
};

}  // namespace bps::server
