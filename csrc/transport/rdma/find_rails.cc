// SPDX-License-Identifier: Apache-2.0
// Which rails to use on this machine, or why there are none.
#include <algorithm>

#include "transport/rdma/device.h"
#include "transport/rdma/libraries.h"
#include "transport/rdma/rdma.h"

namespace bps::transport::rdma {
namespace {

// Users want to hear of the port that is down, not that a table is empty.
RdmaRails nothing(const std::vector<RdmaDevice>& devices, const RdmaOptions& options, const std::string& reason) {
  if (devices.empty()) {
    return {
        {},
        "there is no RDMA device",
        "load the card's driver; for SoftRoCE: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev <interface>"};
  }
  bool matched = false;
  for (const RdmaDevice& device : devices) {
    for (const RdmaPort& port : device.ports) {
      if (!options.hca.matches(device.name, port.number)) continue;
      matched = true;
      if (port.active) continue;
      return {{},
              "port " + std::to_string(port.number) + " of " + device.name + " is " + port.state,
              "bring the link up (ip link set <interface> up), or choose another with BPS_RDMA_HCA"};
    }
  }
  if (!matched) {
    return {{}, "BPS_RDMA_HCA matches no port of any device", "`bps doctor` lists the devices; correct or unset it"};
  }
  return {{}, reason, "give the interface an IP address, or set BPS_RDMA_GID_INDEX; `bps doctor` shows the GIDs"};
}

Rail rail_of(const GidChoice& choice, const RdmaOptions& options) {
  const GidEntry& gid = *choice.entry;
  return {.device = gid.device,
          .port = gid.port,
          .gid_index = gid.index,
          .gid_forced = options.gid_index.has_value(),
          .type = gid.type,
          .address = gid.address,
          .interface = gid.interface,
          .reason = choice.reason};
}

}  // namespace

RdmaRails find_rdma(const RdmaOptions& options, GidWish wish) {
  const RdmaLibraries& libraries = rdma_libraries();
  if (!libraries.ready) return {{}, libraries.why_not, libraries.hint};
  wish.index = options.gid_index;
  const auto devices = list_rdma_devices();
  struct Candidate {
    std::size_t place;
    std::vector<GidEntry> gids;
  };
  std::vector<Candidate> candidates;  // one per port
  std::vector<GidEntry> all;
  for (const RdmaDevice& device : devices) {
    for (const RdmaPort& port : device.ports) {
      if (!options.hca.matches(device.name, port.number)) continue;
      candidates.push_back({options.hca.place(device.name, port.number), port.gids});
      all.insert(all.end(), port.gids.begin(), port.gids.end());
    }
  }
  const GidChoice best = choose_gid(all, wish);
  if (best.entry == nullptr) return nothing(devices, options, best.reason);
  RdmaRails found;
  if (!options.hca.names_ports()) {
    found.rails.push_back(rail_of(best, options));
    return found;
  }
  std::ranges::stable_sort(candidates, {}, &Candidate::place);
  for (const Candidate& candidate : candidates) {
    const GidChoice choice = choose_gid(candidate.gids, wish);
    if (choice.entry != nullptr) found.rails.push_back(rail_of(choice, options));
  }
  return found;
}

}  // namespace bps::transport::rdma
