// SPDX-License-Identifier: Apache-2.0
#include "worker/places.h"

#include <algorithm>
#include <numeric>

namespace bps::worker {
namespace {

// Small tensors belong to every second loop where the number of loops is even, and so to the first of two. A caller
// that waits for one after another then works for the same loop all the time. Otherwise another rank's push wakes the
// thread of the loop to which this caller has not come yet.
constexpr std::uint64_t kSmallTensor = 64 << 10;

}  // namespace

bool Places::meets(std::size_t worker_loop, std::size_t worker_loops, std::size_t shard, std::size_t shards) {
  const std::size_t common = std::gcd(worker_loops, shards);
  return worker_loop % common == shard % common;
}

std::size_t Places::slots() const {
  return key_map_.slots.empty() ? key_map_.servers : key_map_.slots.size();
}

std::vector<std::uint32_t> Places::servers_of(const Tensor& tensor) const {
  std::vector<std::uint32_t> servers(tensor.whole.count());
  for (std::size_t i = 0; i < tensor.plans.whole.size(); ++i) {
    for (const Part& part : tensor.plans.whole[i]) {
      const std::size_t place = part.for_host() ? part.place : i % count();
      servers[part.partition] = servers_.server_of(place);
    }
  }
  return servers;
}

Deal Places::deal(std::span<const std::shared_ptr<Tensor>> tensors) const {
  Deal deal{std::vector<std::uint64_t>(key_map_.servers), std::vector<double>(key_map_.servers)};
  for (const std::shared_ptr<Tensor>& tensor : tensors) {
    const std::vector<std::uint32_t> servers = servers_of(*tensor);
    for (std::uint32_t i = 0; i < servers.size(); ++i) deal.bytes[servers[i]] += tensor->whole.piece(i).length;
    const auto bytes = static_cast<double>(tensor->bytes);
    const tensor::KeyMapConfig& key_map = key_map_of(*tensor->group);
    const double weights = std::accumulate(key_map.weights.begin(), key_map.weights.end(), 0.0);
    if (weights == 0) {  // they take turns
      for (double& due : deal.due) due += bytes / key_map.servers;
      continue;
    }
    for (std::uint32_t slot = 0; slot < key_map.weights.size(); ++slot) {
      if (key_map.weights[slot] > 0) deal.due[key_map.slots[slot]] += bytes * key_map.weights[slot] / weights;
    }
  }
  return deal;
}

std::uint64_t Deal::all() const {
  return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
}

std::uint64_t Deal::beyond() const {
  double sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) sum += std::max(static_cast<double>(bytes[i]) - due[i], 0.0);
  return static_cast<std::uint64_t>(sum);
}

std::size_t Places::count() const {
  if (!hosts_.active() || !own_server_.empty()) return servers_.count();
  return servers_.count() + hosts_.ranks(hosts_.host_of(rank_)).size();
}

std::size_t Places::of_relay(std::uint32_t worker_rank, std::size_t worker_loop) const {
  if (!own_server_.empty()) return servers_.first(own_server_[worker_rank]) + worker_loop;
  return servers_.count() + hosts_.local_index(worker_rank);
}

std::vector<std::size_t> Places::needed(std::size_t worker_loop, std::size_t worker_loops,
                                        const van::Group& all) const {
  std::vector<bool> is_needed(count());
  for (std::uint32_t server = 0; server < key_map_.servers; ++server) {
    const bool direct = !hosts_.active() || !needs_relay(all, server) || hosts_.relays(rank_, server);
    const std::size_t shards = servers_.loops(server);
    for (std::size_t shard = 0; direct && shard < shards; ++shard) {
      if (meets(worker_loop, worker_loops, shard, shards)) is_needed[servers_.first(server) + shard] = true;
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

// Returns true when a rank's pushes to a server go by its host's relay: the host has others to sum with, or the group
// need not leave the host at all.
bool Places::needs_relay(const van::Group& group, std::uint32_t server) const {
  if (!hosts_.active()) return false;
  const std::uint32_t here = hosts_.host_of(rank_);
  if (van::hosts_of(group, hosts_) == 1) return hosts_.host_of_server(server) != here;
  return std::ranges::count(group.ranks, here, [&](std::uint32_t rank) { return hosts_.host_of(rank); }) > 1;
}

// A group has its weights from its first tensor on.
const tensor::KeyMapConfig& Places::key_map_of(const van::Group& group) const {
  if (!weights_) return key_map_;
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = key_maps_.try_emplace(group.id, key_map_);
  if (is_new) {
    found->second.weights = weights_->by_slot(group, key_map_.slots);
    found->second.deal = tensor::deal_slots(found->second.weights);
  }
  return found->second;
}

// Returns the order in which the partitions of a tensor go out, so that each server has some all the time. Where
// servers sum whole shards, the first partition of each shard comes first.
std::vector<std::uint32_t> Places::order_of(const tensor::Partitioning& cut, bool by_shard) {
  std::vector<std::uint32_t> order(cut.count());
  std::iota(order.begin(), order.end(), 0U);
  const auto in_shard = [&](std::uint32_t i) {
    const tensor::Partitioning::Piece piece = cut.piece(i);
    return piece.offset - cut.shard_offset(piece.shard);
  };
  if (by_shard) std::ranges::stable_sort(order, {}, in_shard);
  return order;
}

Plan Places::plan(const Tensor& tensor, const tensor::Partitioning& cut, bool own_shards,
                  std::span<const std::uint64_t> load, std::size_t worker_loops) const {
  const tensor::KeyMapConfig& key_map = key_map_of(*tensor.group);
  const std::size_t width = count();
  Plan plan(worker_loops * width);
  std::vector<std::uint64_t> balance(load.begin(), load.end());
  const tensor::BalancedPlacement balanced(balance, cut, key_map.weights);
  std::vector<bool> by_relay(key_map_.servers);
  for (std::uint32_t server = 0; server < by_relay.size(); ++server) {
    by_relay[server] = needs_relay(*tensor.group, server);
  }
  const bool by_shard = own_shards && own_server_.size() == key_map_.servers;
  std::vector<std::uint32_t> turns(worker_loops);
  for (const std::uint32_t i : order_of(cut, by_shard)) {
    const tensor::Partitioning::Piece piece = cut.piece(i);
    std::uint32_t server;
    if (by_shard) {
      server = own_server_[tensor.group->ranks[piece.shard]];
    } else if (!load.empty()) {
      server = tensor::owner_of(key_map, balanced.slot(i), tensor.id, i);
    } else {
      server = tensor::server_of(key_map, tensor.id, i);
    }
    const std::uint32_t spread = tensor::spread_of(tensor.id, i);
    // All ranks must find the same loop of the server, even with different numbers of loops.
    const std::uint32_t by_loop = tensor.bytes <= kSmallTensor ? spread - spread % 2 : spread;
    const std::size_t worker_loop = by_loop % worker_loops;
    const std::size_t place = servers_.first(server) + by_loop % servers_.loops(server);
    Part part{.partition = i, .turn = turns[worker_loop]++};
    if (by_relay[server]) {
      part.place = static_cast<std::uint32_t>(place);
      const std::uint32_t relay = hosts_.relay(hosts_.host_of(rank_), server, tensor::relay_hash(spread));
      plan[worker_loop * width + of_relay(relay, worker_loop)].push_back(part);
    } else {
      plan[worker_loop * width + place].push_back(part);
    }
  }
  return plan;
}

}  // namespace bps::worker
