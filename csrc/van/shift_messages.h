// SPDX-License-Identifier: Apache-2.0
// Defines the messages that give servers other weights while the job runs, at a round of each tensor that all ranks
// agree on: see shift.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace bps::van {

struct TensorRound {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.group, m.tensor, m.round); }
  bool operator==(const TensorRound&) const = default;
  // Lists of rounds are sorted by this key, and no key is in them twice.
  std::uint64_t key() const { return (std::uint64_t{group} << 32) | tensor; }
  static bool are_sorted(const std::vector<TensorRound>& all) {
    return std::ranges::adjacent_find(all, [](const auto& a, const auto& b) { return a.key() >= b.key(); }) ==
           all.end();
  }
};
struct LinkUse {  // member -> scheduler, with its heartbeats: what its data connections over a network have carried
  struct Peer {
    std::uint32_t node = 0;
    std::uint64_t bytes = 0;    // bytes that have gone out to this node since the last message
    std::uint64_t busy_us = 0;  // for how long bytes of the busiest connection were on their way or waited
    static constexpr void fields(auto& io, auto& m) { io(m.node, m.bytes, m.busy_us); }
    bool operator==(const Peer&) const = default;
  };
  std::vector<Peer> peers;
  static constexpr void fields(auto& io, auto& m) { io(m.peers); }
  bool operator==(const LinkUse&) const = default;
};
struct BeginShift {  // scheduler -> workers: rounds that begin from here on wait; the reply is Rounds
  std::uint32_t number = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.number); }
  bool operator==(const BeginShift&) const = default;
};
struct Rounds {  // worker -> scheduler: the next round of each tensor that has begun one
  std::uint32_t number = 0;
  std::vector<TensorRound> next;
  static constexpr void fields(auto& io, auto& m) {
    io(m.number, m.next);
    io.require([&] { return TensorRound::are_sorted(m.next); });
  }
  bool operator==(const Rounds&) const = default;
};
struct EndShift {  // scheduler -> workers: the rounds that wait go on
  std::uint32_t number = 0;
  std::vector<std::uint64_t> links;  // by node, in bytes per second; empty: the shift is called off
  std::vector<TensorRound> from;  // the first round of each tensor that is placed by them; not listed: the next round
  static constexpr void fields(auto& io, auto& m) {
    io(m.number, m.links, m.from);
    io.require([&] { return TensorRound::are_sorted(m.from); });
  }
  bool operator==(const EndShift&) const = default;
};

}  // namespace bps::van
