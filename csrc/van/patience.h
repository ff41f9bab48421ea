// SPDX-License-Identifier: Apache-2.0
// Keeps the processes that wait for others to come, each until a time of its own. Belongs to the scheduler's thread.
#pragma once

#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "van/rendezvous.h"

namespace bps::van {

class Patience {
 public:
  // The peer waits until this time; with max() it waits for ever.
  void begin(Peer peer, Clock::time_point until) {
    end(peer);
    until_[peer] = until;
    if (until != Clock::time_point::max()) by_time_.emplace(until, peer);
  }
  // Returns false where the peer did not wait.
  bool end(Peer peer) {
    const auto found = until_.find(peer);
    if (found == until_.end()) return false;
    by_time_.erase({found->second, peer});
    until_.erase(found);
    return true;
  }
  std::vector<Peer> end_all() {
    std::vector<Peer> peers;
    for (const auto& [peer, until] : std::exchange(until_, {})) peers.push_back(peer);
    by_time_.clear();
    return peers;
  }
  bool has(Peer peer) const { return until_.contains(peer); }
  bool empty() const { return until_.empty(); }
  bool is_over(Peer peer, Clock::time_point now) const {
    const auto found = until_.find(peer);
    return found != until_.end() && found->second <= now;
  }
  // Returns when the first one gives up, or nothing where none does.
  std::optional<Clock::time_point> first() const {
    return by_time_.empty() ? std::nullopt : std::optional(by_time_.begin()->first);
  }

 private:
  std::unordered_map<Peer, Clock::time_point> until_;
  std::set<std::pair<Clock::time_point, Peer>> by_time_;
};

}  // namespace bps::van
