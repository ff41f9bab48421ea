// SPDX-License-Identifier: Apache-2.0
// Tells which ranks share a host, and which of them speaks for the others.
//
// Ranks of one host share its links. For a group on several hosts the ranks of a host therefore sum among themselves
// first, at one of them, the relay. It sends one contribution for all of them and receives one answer. Each server loop
// has a relay of its own on each host, or several that share its partitions where the host has more ranks than there
// are servers. So the work is spread over the ranks, and a server needs few connections. All are pure functions of the
// membership: every process computes the same.
#pragma once

#include <cstdint>
#include <vector>

#include "van/membership.h"

namespace bps::van {

class Hosts {
 public:
  Hosts() = default;
  explicit Hosts(const Membership& members);

  // Returns true when sums happen on the host first: more than one host has workers, some host has several, and every
  // worker is willing (BPS_HOST_SUM) and able to share memory. Where it is false nothing below needs to be asked.
  bool active() const { return active_; }
  // Hosts are numbered in the order of their lowest rank.
  std::size_t count() const { return ranks_.size(); }
  std::uint32_t host_of(std::uint32_t worker_rank) const { return host_of_[worker_rank]; }
  const std::vector<std::uint32_t>& ranks(std::uint32_t host) const { return ranks_[host]; }
  // Returns the position of a rank among those of its host.
  std::uint32_t local_index(std::uint32_t worker_rank) const { return local_index_[worker_rank]; }
  // Returns the host of a server, or kNoHost where no worker runs on it.
  static constexpr std::uint32_t kNoHost = ~std::uint32_t{0};
  std::uint32_t host_of_server(std::uint32_t server_rank) const { return servers_[server_rank].host; }

  // Returns the rank that speaks for `host` towards a server. `hash` spreads the partitions of one server over several
  // ranks where there are fewer servers than ranks on the host.
  std::uint32_t relay(std::uint32_t host, std::uint32_t server_rank, std::uint64_t hash) const;
  // Returns true when relay() is this rank for some hash.
  bool relays(std::uint32_t worker_rank, std::uint32_t server_rank) const;

 private:
  struct Server {
    std::uint32_t host;
    std::int32_t worker;  // the rank of its process, if that is a worker, too; else kNoRank
    std::uint32_t first;  // where the relays of other hosts begin: an index into the ranks of each
  };
  std::uint32_t spread(std::uint32_t host) const;  // how many ranks of a host speak to one server

  bool active_ = false;
  std::vector<std::uint32_t> host_of_;      // by worker rank
  std::vector<std::uint32_t> local_index_;  // by worker rank
  std::vector<std::vector<std::uint32_t>> ranks_;
  std::vector<Server> servers_;
};

// Holds the ranks of a group that contribute together: those of one host, or one rank alone.
struct Contributor {
  std::uint32_t host = 0;
  std::vector<std::uint32_t> positions;  // the positions of its ranks in the group, ascending

  bool is_host() const { return positions.size() > 1; }
};

// Lists the contributors to the rounds of a group, in the order of summing.
class Contributors {
 public:
  // Each rank contributes by itself.
  static Contributors each(const Group& group);
  // The ranks of a host contribute together. Where sums do not happen on hosts first, each rank contributes by itself.
  static Contributors by_host(const Group& group, const Hosts& hosts);
  // Only the ranks on this host contribute, each by itself. There may be none.
  static Contributors on_host(const Group& group, const Hosts& hosts, std::uint32_t host);

  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t size() const { return static_cast<std::uint32_t>(list_.size()); }
  const Contributor& operator[](std::uint32_t index) const { return list_[index]; }
  // Returns the contributor that a position in the group belongs to, or kNone.
  std::uint32_t of_position(std::uint32_t position) const {
    return position < of_position_.size() ? of_position_[position] : kNone;
  }
  // Returns true when a contributor stands for several ranks.
  bool has_hosts() const { return has_hosts_; }

 private:
  void add(std::uint32_t host, std::uint32_t position, bool join);

  std::vector<Contributor> list_;
  std::vector<std::uint32_t> of_position_;
  bool has_hosts_ = false;
};

// Returns on how many hosts a group has ranks.
std::size_t hosts_of(const Group& group, const Hosts& hosts);

}  // namespace bps::van
