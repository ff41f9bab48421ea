// SPDX-License-Identifier: Apache-2.0
#include "van/hosts.h"

#include <algorithm>
#include <map>
#include <set>

namespace bps::van {

Hosts::Hosts(const Membership& members) {
  std::map<std::string, std::uint32_t> known;
  bool willing = true;
  for (std::uint32_t rank = 0; rank < members.workers; ++rank) {
    const Node& node = *members.worker(rank);
    willing &= node.sums_on_host;
    const auto [found, fresh] = known.emplace(node.host_key, static_cast<std::uint32_t>(ranks_.size()));
    if (fresh) ranks_.emplace_back();
    host_of_.push_back(found->second);
    local_index_.push_back(static_cast<std::uint32_t>(ranks_[found->second].size()));
    ranks_[found->second].push_back(rank);
  }
  active_ = willing && ranks_.size() > 1 && ranks_.size() < members.workers;
  for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
    const Node& node = *members.server(rank);
    const auto found = known.find(node.host_key);
    const auto worker = static_cast<std::uint32_t>(node.worker_rank);
    servers_.push_back({.host = found == known.end() ? kNoHost : found->second,
                        .worker = node.worker_rank,
                        .first = node.worker_rank >= 0 ? local_index_[worker] : rank});
  }
}

// Returns how many ranks speak to one server: several where there are fewer servers, so that all ranks take part.
std::uint32_t Hosts::spread(std::uint32_t host) const {
  const std::size_t servers = servers_.size();
  return static_cast<std::uint32_t>((ranks_[host].size() + servers - 1) / servers);
}

std::uint32_t Hosts::relay(std::uint32_t host, std::uint32_t server_rank, std::uint64_t hash) const {
  // A server that is a worker of this host needs no other rank to speak to it.
  const Server& server = servers_[server_rank];
  if (server.worker >= 0 && server.host == host) return static_cast<std::uint32_t>(server.worker);
  const auto servers = static_cast<std::uint32_t>(servers_.size());
  const auto turn = static_cast<std::uint32_t>(hash % spread(host));
  return ranks_[host][(server.first + servers * turn) % ranks_[host].size()];
}

bool Hosts::relays(std::uint32_t worker_rank, std::uint32_t server_rank) const {
  const std::uint32_t host = host_of_[worker_rank];
  for (std::uint32_t turn = 0; turn < spread(host); ++turn) {
    if (relay(host, server_rank, turn) == worker_rank) return true;
  }
  return false;
}

void Contributors::add(std::uint32_t host, std::uint32_t position, bool join) {
  std::uint32_t index = size();
  if (join) {
    const auto found = std::ranges::find(list_, host, &Contributor::host);
    index = static_cast<std::uint32_t>(found - list_.begin());
  }
  if (index == size()) list_.push_back({.host = host, .positions = {}});
  list_[index].positions.push_back(position);
  of_position_[position] = index;
  has_hosts_ |= list_[index].is_host();
}

Contributors Contributors::each(const Group& group) {
  Contributors made;
  made.of_position_.assign(group.size(), kNone);
  for (std::uint32_t i = 0; i < group.size(); ++i) made.add(0, i, false);
  return made;
}

Contributors Contributors::by_host(const Group& group, const Hosts& hosts) {
  if (!hosts.active() || hosts_of(group, hosts) < 2) return each(group);
  Contributors made;
  made.of_position_.assign(group.size(), kNone);
  for (std::uint32_t i = 0; i < group.size(); ++i) {
    made.add(hosts.host_of(group.ranks[i]), i, true);
  }
  return made;
}

Contributors Contributors::on_host(const Group& group, const Hosts& hosts, std::uint32_t host) {
  Contributors made;
  made.of_position_.assign(group.size(), kNone);
  for (std::uint32_t i = 0; i < group.size(); ++i) {
    if (hosts.host_of(group.ranks[i]) == host) made.add(host, i, false);
  }
  return made;
}

std::size_t hosts_of(const Group& group, const Hosts& hosts) {
  std::set<std::uint32_t> found;
  for (const std::uint32_t rank : group.ranks) found.insert(hosts.host_of(rank));
  return found.size();
}

}  // namespace bps::van
