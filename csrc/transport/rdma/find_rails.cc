// SPDX-License-Identifier: Apache-2.0
// Finds the rails to use on this machine, or says why there are none.
#include <utility>

#include "transport/rdma/choose_rails.h"
#include "transport/rdma/device.h"
#include "transport/rdma/libraries.h"
#include "transport/rdma/numa.h"
#include "transport/rdma/rdma.h"

namespace bps::transport::rdma {
namespace {

// Says why there are none: users want to hear of the port that is down, not that a table is empty.
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

Distance distance_from_gpu(const RdmaOptions& options, const RdmaDevice& device) {
  if (options.near_gpu.empty()) return {};
  return distance_of("/sys/bus/pci/devices/" + options.near_gpu, "/sys/class/infiniband/" + device.name + "/device");
}

}  // namespace

RdmaRails find_rdma(const RdmaOptions& options, GidWish wish) {
  const RdmaLibraries& libraries = rdma_libraries(options.verbs_library.c_str());
  if (!libraries.ready) return {{}, libraries.why_not, libraries.hint};
  wish.index = options.gid_index;
  const auto devices = list_rdma_devices();
  std::vector<RailCandidate> candidates;
  for (const RdmaDevice& device : devices) {
    for (const RdmaPort& port : device.ports) {
      if (!options.hca.matches(device.name, port.number)) continue;
      candidates.push_back({.place = options.hca.place(device.name, port.number),
                            .speed = port.speed,
                            .numa_node = device.numa_node,
                            .from_gpu = distance_from_gpu(options, device),
                            .gids = port.gids});
    }
  }
  RailChoice chosen =
      choose_rails(candidates, {.gid = wish, .named = options.hca.names_ports(), .near_nodes = bound_numa_nodes()});
  if (chosen.rails.empty()) return nothing(devices, options, chosen.why_not);
  return {std::move(chosen.rails), "", ""};
}

}  // namespace bps::transport::rdma
