// SPDX-License-Identifier: Apache-2.0
#include "van/membership.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "tensor/key_map.h"

namespace bps::van {
namespace {

constexpr std::size_t kMostSlots = 1U << 20;

}  // namespace

std::string Node::describe() const {
  std::string text;
  if (worker_rank >= 0) text = "worker " + std::to_string(worker_rank);
  if (server_rank >= 0) text += (text.empty() ? "server " : " and server ") + std::to_string(server_rank);
  if (text.empty()) text = "a process without a rank";
  return text + " (" + host + ", pid " + std::to_string(pid) + ")";
}

const Node* Membership::worker(std::uint32_t rank) const {
  if (rank >= workers || rank >= nodes.size()) return nullptr;
  return &nodes[rank];
}

const Node* Membership::server(std::uint32_t rank) const {
  const auto rank_of = [](const Node& node) { return std::int64_t{node.server_rank}; };
  const std::int64_t wanted = rank;
  if (rank < nodes.size() && rank_of(nodes[rank]) == wanted) return &nodes[rank];
  const auto extra = std::span(nodes).subspan(std::min<std::size_t>(workers, nodes.size()));
  const auto ordered = std::ranges::lower_bound(extra, wanted, {}, rank_of);
  if (ordered != extra.end() && rank_of(*ordered) == wanted) return &*ordered;
  const auto found = std::ranges::find(nodes, wanted, rank_of);
  return found == nodes.end() ? nullptr : &*found;
}

const Node* Membership::by_id(std::uint32_t id) const {
  return id == 0 || id > nodes.size() ? nullptr : &nodes[id - 1];
}

const Node* Membership::find(std::uint64_t identity) const {
  const auto found = std::ranges::find(nodes, identity, &Node::identity);
  return found == nodes.end() ? nullptr : &*found;
}

std::string Membership::name_of(std::uint32_t id) const {
  const Node* node = by_id(id);
  if (node == nullptr) return "?";
  if (node->server_rank >= 0) return "server " + std::to_string(node->server_rank);
  return "worker " + std::to_string(node->worker_rank);
}

Group Membership::all() const {
  Group group;
  for (std::uint32_t rank = 0; rank < workers; ++rank) group.ranks.push_back(rank);
  return group;
}

std::vector<std::uint32_t> Membership::server_of_slot() const {
  std::vector<std::uint32_t> found(slots.empty() ? servers : slots.size(), tensor::kNoServer);
  std::unordered_map<std::uint64_t, std::size_t> slot_of;
  for (std::size_t i = 0; i < slots.size(); ++i) slot_of.emplace(slots[i], i);
  for (const Node& node : nodes) {
    if (node.server_rank < 0) continue;
    const auto rank = static_cast<std::uint32_t>(node.server_rank);
    found[slots.empty() ? rank : slot_of.at(node.identity)] = rank;
  }
  return found;
}

void Membership::take_slots(std::vector<std::uint64_t> before) {
  slots = std::move(before);
  std::vector<std::uint64_t> here(servers);
  for (const Node& node : nodes) {
    if (node.server_rank >= 0) here[static_cast<std::size_t>(node.server_rank)] = node.identity;
  }
  const std::unordered_set<std::uint64_t> are_here(here.begin(), here.end());
  const std::unordered_set<std::uint64_t> have_one(slots.begin(), slots.end());
  auto lost = slots.begin();
  for (const std::uint64_t identity : here) {
    if (have_one.contains(identity)) continue;
    lost = std::find_if(lost, slots.end(), [&](std::uint64_t other) { return !are_here.contains(other); });
    if (lost == slots.end()) {
      slots.push_back(identity);
      lost = slots.end();
    } else {
      *lost++ = identity;
    }
  }
}

std::uint32_t Membership::all_server_loops() const {
  std::uint64_t loops = 0;
  for (const Node& node : nodes) loops += node.server_rank == kNoRank ? 0U : node.server_loops;
  if (servers > 0 && slots.size() > servers) loops = loops * slots.size() / servers;
  return static_cast<std::uint32_t>(loops);
}

bool Membership::has_entrants() const {
  const auto is_new = [](const Node& one) { return one.worker_rank != kNoRank && !one.has_state; };
  return std::ranges::any_of(nodes, &Node::has_state) && std::ranges::any_of(nodes, is_new);
}

bool Membership::is_consistent() const {
  if (workers > nodes.size()) return false;
  if (slots.size() > kMostSlots) return false;
  std::vector<std::uint64_t> owners = slots;
  std::ranges::sort(owners);
  std::vector<bool> servers_seen(nodes.size());
  std::size_t servers_found = 0;
  std::int32_t last_extra = kNoRank;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    const bool is_worker = i < workers;
    if (node.id != i + 1 || !node.has_loops()) return false;
    if (node.worker_rank != (is_worker ? static_cast<std::int32_t>(i) : kNoRank)) return false;
    if (node.server_rank < kNoRank || (!is_worker && node.server_rank <= last_extra)) return false;
    if (!is_worker) last_extra = node.server_rank;
    if (node.server_rank == kNoRank) continue;
    if (!slots.empty() && !std::ranges::binary_search(owners, node.identity)) return false;
    const auto rank = static_cast<std::size_t>(node.server_rank);
    if (rank >= servers || rank >= servers_seen.size() || servers_seen[rank]) return false;
    servers_seen[rank] = true;
    ++servers_found;
  }
  return servers_found == servers;
}

std::int32_t Group::index_of(std::uint32_t worker_rank) const {
  const auto found = std::ranges::lower_bound(ranks, worker_rank);
  if (found == ranks.end() || *found != worker_rank) return kNoRank;
  return static_cast<std::int32_t>(found - ranks.begin());
}

std::string name_ranks(std::span<const std::uint32_t> ranks) {
  constexpr std::size_t kMostShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostShown); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  if (ranks.size() > kMostShown) text += " and " + std::to_string(ranks.size() - kMostShown) + " more";
  return text;
}

}  // namespace bps::van
