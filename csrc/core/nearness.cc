// SPDX-License-Identifier: Apache-2.0
#include "core/nearness.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <vector>

namespace bps {
namespace {

bool is_pci(std::string_view name) {
  const bool is_root = name.starts_with("pci") && std::ranges::count(name, ':') == 1;     // pci0000:16
  return is_root || (std::ranges::count(name, ':') == 2 && name.find('.') != name.npos);  // 0000:16:01.0
}

// Returns the root complex and the bridges that a device is behind, from the top; nothing where it is not on PCI.
std::vector<std::string> bridges_above(const std::string& device) {
  std::error_code none;
  std::vector<std::string> path;
  for (const auto& part : std::filesystem::canonical(device, none)) {
    if (is_pci(part.native())) path.push_back(part);
  }
  if (!path.empty()) path.pop_back();  // the device itself
  return path;
}

int node_of(const std::string& device) {
  int node = -1;
  std::ifstream(device + "/numa_node") >> node;
  return node;
}

}  // namespace

const char* to_string(Nearness nearness) {
  switch (nearness) {
    case Nearness::kSwitch: return "switch";
    case Nearness::kRoot: return "root";
    case Nearness::kNode: return "node";
    case Nearness::kFar: break;
  }
  return "far";
}

Distance distance_of(const std::string& one, const std::string& other) {
  const auto above = bridges_above(one);
  const auto above_other = bridges_above(other);
  if (above.empty() || above_other.empty()) return {};
  const auto [end, _] = std::ranges::mismatch(above, above_other);
  const auto shared = static_cast<std::uint32_t>(end - above.begin());
  if (shared > 0) return {shared > 1 ? Nearness::kSwitch : Nearness::kRoot, shared};
  const int node = node_of(one);
  return {node >= 0 && node == node_of(other) ? Nearness::kNode : Nearness::kFar, 0};
}

}  // namespace bps
