// SPDX-License-Identifier: Apache-2.0
// Tells how near two devices of this machine are to each other, by the bridges of PCI that both are behind, as the
// kernel shows them in sysfs. It is a pure function of that tree.
//
//   /sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0
//                root       port         switch       device
//
// A virtual function lies in the tree beside its physical one, so that it is as near. Any thread may call it.
#pragma once

#include <cstdint>
#include <string>

namespace bps {

enum class Nearness : std::uint8_t {
  kSwitch,  // behind one bridge or switch
  kRoot,    // at one root complex
  kNode,    // at one NUMA node
  kFar,     // none of these, or nobody knows
};
const char* to_string(Nearness nearness);  // "switch", "root", "node", "far"

struct Distance {
  Nearness nearness = Nearness::kFar;
  std::uint32_t bridges = 0;  // how many both are behind, with the root complex; more of them are nearer

  bool operator==(const Distance&) const = default;
  bool is_less_than(const Distance& other) const {
    return nearness != other.nearness ? nearness < other.nearness : bridges > other.bridges;
  }
};

// Each is the folder of a device, or a link to it, as in /sys/bus/pci/devices/0000:18:00.0 or
// /sys/class/infiniband/mlx5_0/device. Of a device that is not there, or not on PCI, everything is far.
Distance distance_of(const std::string& one, const std::string& other);

}  // namespace bps
