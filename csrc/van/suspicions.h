// SPDX-License-Identifier: Apache-2.0
// Keeps which members suspect another one, while it is not known whether that one is lost, and counts how often
// connections broke. Belongs to the scheduler's thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "van/member_table.h"

namespace bps::van {

class Suspicions {
 public:
  // Notes that a peer suspects a node. A peer that asks again and again is answered once.
  void add(Peer from, std::uint32_t node, bool is_broken) {
    const auto is_same = [&](const Suspicion& one) {
      return one.from == from && one.node == node && one.is_broken == is_broken;
    };
    if (std::ranges::none_of(open_, is_same)) open_.push_back({from, node, Clock::now(), is_broken});
  }
  bool empty() const { return open_.empty(); }
  void clear() { open_.clear(); }
  // Forgets what this peer has asked, because its connection has ended.
  void forget(Peer from) {
    std::erase_if(open_, [from](const Suspicion& one) { return one.from == from; });
  }
  // Returns a peer that has told that its connection to `node` broke, and that can be answered now.
  std::optional<Peer> find_broken(std::uint32_t node, bool is_here) const {
    const auto found = std::ranges::find_if(open_, [&, now = Clock::now()](const Suspicion& one) {
      return one.is_broken && is_due(one, node, is_here, now);
    });
    return found == open_.end() ? std::nullopt : std::optional(found->from);
  }
  struct Due {
    Peer from;
    bool is_broken;
  };
  // Takes out those who are to hear now whether the member can be reached. `is_heard` says that it has just given a
  // sign of life.
  std::vector<Due> take(const Member& about, bool is_heard) {
    std::vector<Due> due;
    std::erase_if(open_, [&, now = Clock::now()](const Suspicion& one) {
      const bool may_speak = about.can_answer(one.is_broken);
      if (!is_due(one, about.node->id, may_speak, now) || (may_speak && !is_heard)) return false;
      due.push_back({one.from, one.is_broken});
      return true;
    });
    return due;
  }

  // Counts that the connection between two members, given by their identities, broke although both are here. Returns
  // false where that has happened too often since a step was committed.
  bool count_break(std::uint64_t one, std::uint64_t other) { return ++breaks_[std::minmax(one, other)] <= kMostBreaks; }
  // Chooses a server without which the job goes on, or else the member that has lost more connections.
  Member& choose_lost(MemberTable& members, Member& one, Member& other) const {
    const auto is_spare = [&](const Member& member) {
      return !member.is_worker() && std::ranges::any_of(members.all(), [&](const Member& each) {
        return &each != &member && each.is_here() && each.node->server_rank >= 0;
      });
    };
    if (is_spare(one) != is_spare(other)) return is_spare(one) ? one : other;
    if (one.is_worker() != other.is_worker()) return one.is_worker() ? one : other;
    return broken_pairs_of(one.node->identity) > broken_pairs_of(other.node->identity) ? one : other;
  }
  void forget_breaks() { breaks_.clear(); }

 private:
  struct Suspicion {
    Peer from;
    std::uint32_t node;
    Clock::time_point since;
    bool is_broken;
  };
  // Nobody hears that a member can be reached before its suspicion is so old. What a process has sent before it died
  // may be read after another member has said that it did, but the end of its connection follows closely.
  static constexpr std::chrono::milliseconds kFreshAfter{100};
  static constexpr int kMostBreaks = 2;

  // Counts the members that have lost connections to this one.
  std::ptrdiff_t broken_pairs_of(std::uint64_t identity) const {
    return std::ranges::count_if(
        breaks_, [&](const auto& each) { return each.first.first == identity || each.first.second == identity; });
  }
  static bool is_due(const Suspicion& one, std::uint32_t node, bool may_speak, Clock::time_point now) {
    return one.node == node && (!may_speak || now - one.since >= kFreshAfter);
  }

  std::vector<Suspicion> open_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, int> breaks_;
};

}  // namespace bps::van
