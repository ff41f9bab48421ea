// SPDX-License-Identifier: Apache-2.0
#include "node/tcp_rails.h"

#include <algorithm>
#include <fstream>

#include "core/error.h"
#include "node/local_address.h"
#include "transport/rails.h"

namespace bps::node {

using transport::tcp::TcpRail;

std::vector<TcpRail> find_tcp_rails(const TransportSettings& settings, const std::string& scheduler_host) {
  std::vector<TcpRail> rails;
  for (const std::string& name : interface_names(settings.interface)) {
    rails.push_back({address_of_interface(name), name, interface_speed(name)});
  }
  if (rails.size() > transport::kMostRails) {
    throw Error(ErrorCode::kInvalidArgument, "BPS_INTERFACE names " + std::to_string(rails.size()) + " interfaces",
                "name at most " + std::to_string(transport::kMostRails));
  }
  const std::string address = local_address(settings.node_host, settings.interface, scheduler_host);
  if (rails.empty()) {
    const std::string interface = interface_with(numeric_address(address));
    return {{address, interface, interface_speed(interface)}};
  }
  // The address by which peers know this host belongs to one of the rails, or to none where addresses are translated.
  const auto known = std::ranges::find(rails, numeric_address(address), &TcpRail::address);
  if (known != rails.end()) std::rotate(rails.begin(), known, known + 1);
  rails.front().address = address;
  return rails;
}

std::uint32_t interface_speed(const std::string& interface, const std::string& folder) {
  std::int64_t speed = -1;
  if (!interface.empty()) std::ifstream(folder + "/" + interface + "/speed") >> speed;
  return speed <= 0 || speed >= UINT32_MAX ? 0 : static_cast<std::uint32_t>(speed);
}

std::string describe(const TcpRail& rail) {
  std::string text = rail.interface.empty() ? rail.address : rail.interface + " " + rail.address;
  if (rail.speed > 0) text += " (" + transport::speed_in_words(rail.speed) + ")";
  return text;
}

}  // namespace bps::node
