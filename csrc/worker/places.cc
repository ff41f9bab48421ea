// SPDX-License-Identifier: Apache-2.0
#include "worker/places.h"

#include <algorithm>
#include <numeric>

namespace bps::worker {

bool Places::meets(std::size_t worker_loop, std::size_t worker_loops, std::size_t shard, std::size_t shards) {
  const std::size_t common = std::gcd(worker_loops, shards);
  return worker_loop % common == shard % common;
}

std::size_t Places::slots() const {
  return key_map_.slots.empty() ? key_map_.servers : key_map_.slots.size();
}

std::vector<std::uint32_t> Places::servers_of(const Tensor& tensor) const {
  std::vector<std::uint32_t> servers(tensor.whole.count());
  for (std::size_t i = 0; i < tensor.whole_plan.size(); ++i) {
    for (const Part& part : tensor.whole_plan[i]) {
      const std::size_t place = part.for_host() ? part.place : i % count();
      servers[part.partition] = static_cast<std::uint32_t>(place / loops_per_server_);
    }
  }
  return servers;
}

std::size_t Places::count() const {
  const std::size_t servers = key_map_.servers * loops_per_server_;
  if (!hosts_.active() || !own_server_.empty()) return servers;
  return servers + hosts_.ranks(hosts_.host_of(rank_)).size();
}

std::size_t Places::of_relay(std::uint32_t worker_rank, std::size_t worker_loop) const {
  const std::size_t shards = loops_per_server_;
  if (!own_server_.empty()) return own_server_[worker_rank] * shards + worker_loop;
  return key_map_.servers * shards + hosts_.local_index(worker_rank);
}

std::vector<std::size_t> Places::needed(std::size_t worker_loop, std::size_t worker_loops,
                                        const van::Group& all) const {
  const std::size_t shards = loops_per_server_;
  std::vector<bool> is_needed(count());
  for (std::uint32_t server = 0; server < key_map_.servers; ++server) {
    const bool direct = !hosts_.active() || !needs_relay(all, server) || hosts_.relays(rank_, server);
    for (std::size_t shard = 0; direct && shard < shards; ++shard) {
      if (meets(worker_loop, worker_loops, shard, shards)) is_needed[server * shards + shard] = true;
    }
  }
  if (hosts_.active()) {
    for (const std::uint32_t local : hosts_.ranks(hosts_.host_of(rank_))) {
      is_needed[of_relay(local, worker_loop)] = true;
    }
  }
  std::vector<std::size_t> list;
  for (std::size_t place = 0; place < is_needed.size(); ++place) {
    if (is_needed[place]) list.push_back(place);
  }
  return list;
}

// True when a rank's pushes to a server go by its host's relay: the host has others to sum with, or the group need not
// leave the host at all.
bool Places::needs_relay(const van::Group& group, std::uint32_t server) const {
  if (!hosts_.active()) return false;
  const std::uint32_t here = hosts_.host_of(rank_);
  if (van::hosts_of(group, hosts_) == 1) return hosts_.host_of_server(server) != here;
  return std::ranges::count(group.ranks, here, [&](std::uint32_t member) { return hosts_.host_of(member); }) > 1;
}

Plan Places::plan(const Tensor& tensor, const tensor::Partitioning& cut, bool own_shards,
                  std::span<const std::uint64_t> load, std::size_t worker_loops) const {
  const std::size_t shards = loops_per_server_;
  const std::size_t width = count();
  Plan plan(worker_loops * width);
  std::vector<std::uint64_t> balance(load.begin(), load.end());
  const tensor::BalancedPlacement balanced(balance, cut);
  std::vector<bool> by_relay(key_map_.servers);
  for (std::uint32_t server = 0; server < by_relay.size(); ++server) {
    by_relay[server] = needs_relay(*tensor.group, server);
  }
  for (std::uint32_t i = 0; i < cut.count(); ++i) {
    const tensor::Partitioning::Piece piece = cut.piece(i);
    std::uint32_t server;
    if (own_shards && !own_server_.empty()) {
      server = own_server_[tensor.group->ranks[piece.shard]];
    } else if (!load.empty()) {
      server = tensor::owner_of(key_map_, balanced.slot(i), tensor.id, i);
    } else {
      server = tensor::server_of(key_map_, tensor.id, i);
    }
    const std::uint32_t spread = tensor::spread_of(tensor.id, i);
    const std::size_t worker_loop = spread % worker_loops;
    const std::size_t place = server * shards + spread % shards;
    if (by_relay[server]) {
      const std::uint32_t relay = hosts_.relay(hosts_.host_of(rank_), server, tensor::relay_hash(spread));
      plan[worker_loop * width + of_relay(relay, worker_loop)].push_back({i, static_cast<std::uint32_t>(place)});
    } else {
      plan[worker_loop * width + place].push_back({i});
    }
  }
  return plan;
}

}  // namespace bps::worker
