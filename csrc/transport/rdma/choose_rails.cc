// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/choose_rails.h"

#include <algorithm>

#include "transport/rails.h"

namespace bps::transport::rdma {
namespace {

struct Usable {
  const RailCandidate* port;
  GidChoice choice;
};

Rail rail_of(const Usable& usable, const RailWish& wish) {
  const GidEntry& gid = *usable.choice.entry;
  return {.device = gid.device,
          .port = gid.port,
          .gid_index = gid.index,
          .gid_forced = wish.gid.index.has_value(),
          .type = gid.type,
          .address = gid.address,
          .interface = gid.interface,
          .speed = usable.port->speed,
          .reason = usable.choice.reason};
}

bool is_local(const GidEntry& entry) {
  return entry.type != GidType::kInfiniBand && scope_of(entry.gid) == GidScope::kLinkLocal;
}

bool works_beside(const GidEntry& best, const GidEntry& other) {
  const auto is_ipv6 = [](const GidEntry& entry) { return entry.address.find(':') != std::string::npos; };
  return best.type == other.type && is_ipv6(best) == is_ipv6(other) && is_local(best) == is_local(other);
}

// Leaves only those for which `wanted` holds, if there are any.
template <typename F>
void prefer(std::vector<Usable>& ports, F wanted) {
  if (std::ranges::any_of(ports, wanted)) std::erase_if(ports, [&](const Usable& port) { return !wanted(port); });
}

void prefer_near(std::vector<Usable>& ports) {
  const auto nearest = std::ranges::min_element(ports, [](const Usable& one, const Usable& other) {
    return one.port->from_gpu.is_less_than(other.port->from_gpu);
  });
  if (nearest == ports.end() || nearest->port->from_gpu.nearness == Nearness::kFar) return;
  prefer(ports, [least = nearest->port->from_gpu](const Usable& port) { return port.port->from_gpu == least; });
}

}  // namespace

RailChoice choose_rails(const std::vector<RailCandidate>& candidates, const RailWish& wish) {
  std::vector<GidEntry> all;
  std::vector<Usable> ports;
  for (const RailCandidate& port : candidates) {
    all.insert(all.end(), port.gids.begin(), port.gids.end());
    const GidChoice choice = choose_gid(port.gids, wish.gid);
    if (choice.entry != nullptr) ports.push_back({&port, choice});
  }
  const GidChoice best = choose_gid(all, wish.gid);
  if (best.entry == nullptr) return {{}, best.reason};
  const auto is_best = [&](const Usable& port) {
    return port.choice.entry->device == best.entry->device && port.choice.entry->port == best.entry->port;
  };
  if (wish.named) {
    std::ranges::stable_sort(ports, {}, [](const Usable& port) { return port.port->place; });
  } else {
    std::erase_if(ports, [&](const Usable& port) { return !works_beside(*best.entry, *port.choice.entry); });
    prefer(ports, [&](const Usable& port) { return wish.gid.names(port.choice.entry->interface); });
    prefer_near(ports);
    prefer(ports, [&](const Usable& port) { return std::ranges::count(wish.near_nodes, port.port->numa_node) > 0; });
    std::stable_partition(ports.begin(), ports.end(), is_best);
  }
  RailChoice chosen;
  for (const Usable& port : ports) {
    if (chosen.rails.size() < kMostRails) chosen.rails.push_back(rail_of(port, wish));
  }
  return chosen;
}

}  // namespace bps::transport::rdma
