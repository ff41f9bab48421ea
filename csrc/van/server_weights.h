// SPDX-License-Identifier: Apache-2.0
// Decides how much each server sums for a group: it divides what link_shares() says of a host among its servers. These
// are pure functions of the membership, so every process computes the same.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "van/hosts.h"
#include "van/link_shares.h"
#include "van/membership.h"

namespace bps::van {

// Says which servers sum (BPS_PLACEMENT).
enum class Placement : std::uint8_t {
  kAuto,       // what is best for the links, by their speeds
  kMixed,      // the same, as if all links were equal: BytePS's formula
  kDedicated,  // servers on their own alone, where there are any
  kEmbedded,   // those inside the workers alone
};
Placement parse_placement(std::string_view name);

// Makes servers of the workers that offer it, if those would sum anything for the group of all.
void add_embedded_servers(Membership& members);

// Returns true where servers may get other weights while the job runs: their hosts have links of their own, no member
// comes or goes, and the key hash follows weights. (`balanced` follows what was placed before, `mixed` has a formula.)
bool can_shift(const Membership& members);

class ServerWeights {
 public:
  static constexpr std::uint32_t kAll = 1U << 16;

  // Returns nothing for a job whose servers take turns: where members come and go, keys would move at each loss.
  static std::optional<ServerWeights> of_job(const Membership& members, const Hosts& hosts);
  // Returns the weights by server rank. Together they are kAll, but for rounding. A server without a weight sums
  // nothing.
  std::vector<std::uint32_t> of(const Group& group) const;
  // Returns the same weights by key slot.
  std::vector<std::uint32_t> by_slot(const Group& group, std::span<const std::uint32_t> server_of_slot) const;
  // Says what a host does for the group. The parts of all hosts show why these are the weights.
  struct Part {
    std::string host;
    Site site;
    double share = 0;  // which part of the bytes is summed there
    Busy busy;
  };
  std::vector<Part> parts_of(const Group& group) const;
  // Returns false where no link's speed is known or counts. The links of all hosts are then taken to be equal.
  bool knows_links() const { return knows_links_; }
  // Compares what a loop of the server sums for all workers with the busiest loop. Returns 1 for that one, and 0 for a
  // loop that sums nothing.
  static double load_of_loop(const Membership& members, std::uint32_t server);

 private:
  ServerWeights(const Membership& members, const Hosts& hosts);

  struct Host {
    std::string name;
    double link = 0;                     // bytes per second; 0: unknown
    std::vector<std::uint32_t> servers;  // those that may sum
  };
  std::vector<Host> hosts_for(const Group& group) const;
  std::vector<Site> sites_of(const Group& group, std::span<const Host> hosts) const;
  double sums_of(const Host& host) const;

  std::vector<Host> hosts_;
  std::vector<std::int32_t> worker_of_;   // by server rank; kNoRank: it is a process of its own
  std::vector<std::uint64_t> sum_rates_;  // by server rank
  std::vector<std::uint32_t> host_of_;    // by worker rank
  std::uint32_t servers_ = 0;
  bool sums_on_hosts_ = false;
  bool knows_links_ = false;
};

}  // namespace bps::van
