// SPDX-License-Identifier: Apache-2.0
#include "van/roll.h"

#include <map>
#include <optional>
#include <utility>

namespace bps::van {
namespace {

// Numbers different values, in the order in which they come.
template <typename T>
std::uint32_t number_of(std::map<T, std::uint32_t>& known, std::vector<T>& all, T one) {
  const auto [found, is_new] = known.try_emplace(std::move(one), static_cast<std::uint32_t>(all.size()));
  if (is_new) all.push_back(found->first);
  return found->second;
}

template <typename T>
const T* at(const std::vector<T>& all, std::size_t number) {
  return number < all.size() ? &all[number] : nullptr;
}

std::optional<Node> node_of(const Roll& roll, const Roll::Entry& entry, std::size_t place) {
  const Roll::Host* const host = at(roll.hosts, entry.host);
  const Terms* const terms = at(roll.terms, entry.terms);
  if (host == nullptr || terms == nullptr) return std::nullopt;
  Node node;
  node.id = static_cast<std::uint32_t>(place + 1);
  node.worker_rank = place < roll.workers ? static_cast<std::int32_t>(place) : kNoRank;
  node.server_rank = entry.server_rank;
  node.worker_loops = entry.worker_loops;
  node.server_loops = entry.server_loops;
  node.pid = entry.pid;
  node.host = host->name;
  node.host_key = host->key;
  node.identity = entry.identity;
  node.sums_on_host = entry.sums_on_host;
  node.may_serve = entry.may_serve;
  node.link = host->link;
  node.sum_rate = host->sum_rate;
  node.has_state = entry.has_state;
  node.terms = *terms;
  for (const Roll::Address& address : entry.addresses) {
    const Roll::Name* const transport = at(roll.transports, address.transport);
    if (transport == nullptr) return std::nullopt;
    node.addresses.push_back({transport->text, address.bytes});
  }
  return node;
}

}  // namespace

Roll Membership::pack() const {
  Roll roll;
  roll.workers = workers;
  roll.servers = servers;
  roll.epoch = epoch;
  roll.slots = slots;
  std::map<Roll::Host, std::uint32_t> hosts;
  std::map<Terms, std::uint32_t> terms;
  std::map<Roll::Name, std::uint32_t> transports;
  roll.entries.reserve(nodes.size());
  for (const Node& node : nodes) {
    Roll::Entry& entry = roll.entries.emplace_back();
    entry.server_rank = node.server_rank;
    entry.worker_loops = node.worker_loops;
    entry.server_loops = node.server_loops;
    entry.pid = node.pid;
    entry.host = number_of(hosts, roll.hosts, {node.host, node.host_key, node.link, node.sum_rate});
    entry.terms = number_of(terms, roll.terms, node.terms);
    entry.identity = node.identity;
    entry.sums_on_host = node.sums_on_host;
    entry.may_serve = node.may_serve;
    entry.has_state = node.has_state;
    for (const TransportAddress& address : node.addresses) {
      const std::uint32_t transport = number_of(transports, roll.transports, {address.transport});
      entry.addresses.push_back({static_cast<std::uint8_t>(transport), address.address});
    }
  }
  return roll;
}

bool Membership::unpack(const Roll& roll) {
  workers = roll.workers;
  servers = roll.servers;
  epoch = roll.epoch;
  slots = roll.slots;
  nodes.clear();
  nodes.reserve(roll.entries.size());
  for (std::size_t place = 0; place < roll.entries.size(); ++place) {
    auto node = node_of(roll, roll.entries[place], place);
    if (!node) return false;
    nodes.push_back(std::move(*node));
  }
  return is_consistent() && pack() == roll;
}

}  // namespace bps::van
