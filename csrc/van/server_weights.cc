// SPDX-License-Identifier: Apache-2.0
#include "van/server_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace bps::van {

Placement parse_placement(std::string_view name) {
  if (name == "mixed") return Placement::kMixed;
  if (name == "dedicated") return Placement::kDedicated;
  return name == "embedded" ? Placement::kEmbedded : Placement::kAuto;
}

void add_embedded_servers(Membership& members) {
  Membership with = members;
  for (std::uint32_t rank = 0; rank < members.workers; ++rank) {
    Node& node = with.nodes[rank];
    if (!node.may_serve || node.server_rank >= 0) return;
    node.server_rank = static_cast<std::int32_t>(with.servers++);
  }
  const auto all = ServerWeights::of_job(with, Hosts(with));
  if (!all) return;
  const std::vector<std::uint32_t> weights = all->of(members.all());
  if (std::ranges::any_of(weights.begin() + members.servers, weights.end(), [](auto weight) { return weight > 0; })) {
    members = std::move(with);
  }
}

bool can_shift(const Membership& members) {
  const Node& first = members.nodes.front();
  if (first.terms.min_workers > 0 || first.terms.placement_seconds == 0 || members.servers < 2) return false;
  if (first.terms.placement == "mixed" || first.terms.key_hash == "balanced" || first.terms.key_hash == "mixed") {
    return false;
  }
  return std::ranges::any_of(members.nodes, [&](const Node& node) { return node.host_key != first.host_key; });
}

std::optional<ServerWeights> ServerWeights::of_job(const Membership& members, const Hosts& hosts) {
  if (members.nodes.front().terms.min_workers > 0) return std::nullopt;
  return ServerWeights(members, hosts);
}

ServerWeights::ServerWeights(const Membership& members, const Hosts& hosts)
    : worker_of_(members.servers, kNoRank),
      sum_rates_(members.servers),
      servers_(members.servers),
      sums_on_hosts_(hosts.active()) {
  const Placement placement = parse_placement(members.nodes.front().terms.placement);
  std::map<std::string, std::size_t> known;
  std::vector<std::vector<std::uint32_t>> embedded;
  bool any_dedicated = false;
  for (const Node& node : members.nodes) {
    const auto [found, is_new] = known.emplace(node.host_key, hosts_.size());
    if (is_new) {
      hosts_.emplace_back().name = node.host;
      embedded.emplace_back();
    }
    Host& host = hosts_[found->second];
    host.link = std::max(host.link, placement == Placement::kMixed ? 0.0 : static_cast<double>(node.link));
    if (node.worker_rank >= 0) host_of_.push_back(static_cast<std::uint32_t>(found->second));
    if (node.server_rank < 0) continue;
    worker_of_[static_cast<std::uint32_t>(node.server_rank)] = node.worker_rank;
    sum_rates_[static_cast<std::uint32_t>(node.server_rank)] = node.sum_rate;
    const bool is_dedicated = node.worker_rank < 0;
    any_dedicated |= is_dedicated;
    (is_dedicated ? host.servers : embedded[found->second]).push_back(static_cast<std::uint32_t>(node.server_rank));
  }
  // Equal servers may measure a step of server::coarse_rate() more or less.
  const std::uint64_t most = sum_rates_.empty() ? 0 : std::ranges::max(sum_rates_);
  for (std::uint64_t& rate : sum_rates_) {
    if (rate > 0 && rate + rate / 2 >= most) rate = most;
  }
  // On one host those on their own come first: they leave the processors of ranks alone.
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    const bool only_embedded = placement == Placement::kEmbedded || !any_dedicated;
    const bool only_dedicated = placement == Placement::kDedicated && any_dedicated;
    if (only_embedded || (!only_dedicated && hosts_[i].servers.empty())) hosts_[i].servers = embedded[i];
  }
  // A link whose speed nobody knows counts as the slowest that is known.
  double slowest = 0;
  for (const Host& host : hosts_) {
    if (host.link > 0 && (slowest == 0 || host.link < slowest)) slowest = host.link;
  }
  knows_links_ = slowest > 0;
  for (Host& host : hosts_) {
    if (host.link == 0) host.link = knows_links_ ? slowest : 1;
  }
}

// Returns what the host's servers add, where that is less than what its link carries, and no limit otherwise. So what
// was measured on fast servers, which differs from time to time, changes nothing. (A host that makes more than half of
// the contributions could sum more than its link carries.)
double ServerWeights::sums_of(const Host& host) const {
  double sums = 0;
  for (const std::uint32_t server : host.servers) {
    if (sum_rates_[server] == 0) return Site{}.sums;
    sums += static_cast<double>(sum_rates_[server]);
  }
  return sums < host.link ? sums : Site{}.sums;
}

// A group whose ranks are all on one host is summed by the servers inside these, where there are any: so no rank
// outside it is woken or waited for. Where links count all servers of a host share what it sums.
std::vector<ServerWeights::Host> ServerWeights::hosts_for(const Group& group) const {
  const std::uint32_t home = host_of_[group.ranks.front()];
  const auto is_elsewhere = [&](std::uint32_t rank) { return host_of_[rank] != home; };
  if (std::ranges::any_of(group.ranks, is_elsewhere)) return hosts_;
  const auto is_outside = [&](std::uint32_t server) {
    const std::int32_t worker = worker_of_[server];
    return worker < 0 || group.index_of(static_cast<std::uint32_t>(worker)) < 0;
  };
  std::vector<Host> hosts = hosts_;
  std::vector<std::uint32_t>& servers = hosts[home].servers;
  if (!std::ranges::all_of(servers, is_outside)) std::erase_if(servers, is_outside);
  return hosts;
}

std::vector<Site> ServerWeights::sites_of(const Group& group, std::span<const Host> hosts) const {
  std::vector<Site> sites;
  for (const Host& host : hosts) {
    Site& site = sites.emplace_back();
    site.link = host.link;
    site.sums = host.servers.empty() ? 0 : sums_of(host);
  }
  for (const std::uint32_t rank : group.ranks) {
    Site& site = sites[host_of_[rank]];
    if (!sums_on_hosts_ || site.contributions == 0) ++site.contributions;
  }
  return sites;
}

std::vector<std::uint32_t> ServerWeights::of(const Group& group) const {
  const std::vector<Host> hosts = hosts_for(group);
  const std::vector<double> shares = link_shares(sites_of(group, hosts));
  std::vector<std::uint32_t> weights(servers_);
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const double each = shares[i] * kAll / static_cast<double>(std::max<std::size_t>(hosts[i].servers.size(), 1));
    for (const std::uint32_t server : hosts[i].servers) weights[server] = static_cast<std::uint32_t>(std::lround(each));
  }
  return weights;
}

std::vector<ServerWeights::Part> ServerWeights::parts_of(const Group& group) const {
  const std::vector<Site> sites = sites_of(group, hosts_for(group));
  const std::vector<double> shares = link_shares(sites);
  const std::vector<Busy> busy = busy_per_byte(sites, shares);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < sites.size(); ++i) parts.push_back({hosts_[i].name, sites[i], shares[i], busy[i]});
  return parts;
}

std::vector<std::uint32_t> ServerWeights::by_slot(const Group& group,
                                                  std::span<const std::uint32_t> server_of_slot) const {
  const std::vector<std::uint32_t> weights = of(group);
  std::vector<std::uint32_t> by_slot;
  for (const std::uint32_t server : server_of_slot) by_slot.push_back(server < weights.size() ? weights[server] : 0);
  return by_slot;
}

double ServerWeights::load_of_loop(const Membership& members, std::uint32_t server) {
  const auto weights = of_job(members, Hosts(members));
  if (!weights) return 1;
  const std::vector<std::uint32_t> all = weights->of(members.all());
  const auto load = [&](std::uint32_t rank) {
    return all[rank] / static_cast<double>(members.server(rank)->server_loops);
  };
  double most = 0;
  for (std::uint32_t rank = 0; rank < members.servers; ++rank) most = std::max(most, load(rank));
  return most > 0 ? load(server) / most : 1;  // without weights servers take turns
}

}  // namespace bps::van
