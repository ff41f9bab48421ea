// SPDX-License-Identifier: Apache-2.0
// Packs a Membership for its way to the members. The scheduler of a large job sends it to thousands of them, so what
// many nodes have in common is in it once: the texts and the speeds of a host, the terms, and the names of transports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "van/membership.h"

namespace bps::van {

struct Roll {
  struct Host {
    std::string name;
    std::string key;
    std::uint64_t link = 0;
    std::uint64_t sum_rate = 0;  // of each of its servers; a host is listed once for each rate
    static constexpr void fields(auto& io, auto& m) {
      io.bounded(m.name, kMostHostBytes);
      io.bounded(m.key, kMostHostBytes);
      io(m.link, m.sum_rate);
    }
    auto operator<=>(const Host&) const = default;
  };
  struct Name {
    std::string text;
    static constexpr void fields(auto& io, auto& m) { io.bounded(m.text, kMostTransportBytes); }
    auto operator<=>(const Name&) const = default;
  };
  struct Address {
    std::uint8_t transport = 0;
    Bytes bytes;
    static constexpr void fields(auto& io, auto& m) {
      io(m.transport);
      io.bounded(m.bytes, kMostAddressBytes);
    }
    bool operator==(const Address&) const = default;
  };
  // Describes a node. Its place in the list is its id minus one, which for a worker is its rank.
  struct Entry {
    std::int32_t server_rank = kNoRank;
    std::uint16_t worker_loops = 0;
    std::uint16_t server_loops = 0;
    std::uint32_t pid = 0;
    std::uint32_t host = 0;
    std::uint32_t terms = 0;
    std::uint64_t identity = 0;
    bool sums_on_host = false;
    bool may_serve = false;
    bool has_state = false;
    std::vector<Address> addresses;
    static constexpr void fields(auto& io, auto& m) {
      io(m.server_rank, m.worker_loops, m.server_loops, m.pid, m.host, m.terms, m.identity);
      io(m.sums_on_host, m.may_serve, m.has_state, m.addresses);
    }
    bool operator==(const Entry&) const = default;
  };

  std::uint32_t workers = 0;
  std::uint32_t servers = 0;
  std::uint32_t epoch = 1;
  std::vector<std::uint64_t> slots;
  std::vector<Host> hosts;
  std::vector<Terms> terms;
  std::vector<Name> transports;
  std::vector<Entry> entries;
  static constexpr void fields(auto& io, auto& m) {
    io(m.workers, m.servers, m.epoch, m.slots, m.hosts, m.terms, m.transports, m.entries);
    io.require([&] { return m.entries.size() <= kMostNodes; });
  }
  bool operator==(const Roll&) const = default;
};

}  // namespace bps::van
