// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/device.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <tuple>
#include <utility>

#include "core/fd.h"
#include "transport/rdma/libraries.h"
#include "transport/rdma/numa.h"
#include "transport/rdma/port_speed.h"

namespace bps::transport::rdma {
namespace {

struct FreeList {
  void operator()(ibv_device** list) const { ::ibv_free_device_list(list); }
};
using DeviceList = std::unique_ptr<ibv_device*, FreeList>;

GidType type_of(std::uint32_t type) {
  switch (type) {
    case IBV_GID_TYPE_ROCE_V1: return GidType::kRoceV1;
    case IBV_GID_TYPE_ROCE_V2: return GidType::kRoceV2;
    default: return GidType::kInfiniBand;
  }
}

std::string interface_name(std::uint32_t number) {
  std::array<char, IF_NAMESIZE> name{};
  return number != 0 && ::if_indextoname(number, name.data()) != nullptr ? name.data() : "";
}

// Returns the network interface (ib0) of an InfiniBand port and its address; both are "" when there is none.
std::pair<std::string, std::string> ip_interface_of(const std::string& device_path, unsigned port) {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(raw, ::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
      // The interface of the n-th port of the card has device port n - 1.
      const std::string interface = device_path + "/device/net/" + one->ifa_name;
      unsigned device_port = port;
      std::ifstream(interface + "/dev_port") >> device_port;
      if (device_port + 1 != port) continue;
      std::array<char, NI_MAXHOST> text{};
      const socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
      if (::getnameinfo(one->ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) continue;
      const std::string address = text.data();
      return {one->ifa_name, address.substr(0, address.find('%'))};
    }
  }
  return {};
}

std::vector<ibv_gid_entry> read_gids(ibv_context* context) {
  std::vector<ibv_gid_entry> table(1024);
  const ssize_t count = ::ibv_query_gid_table(context, table.data(), table.size(), 0);
  table.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  return table;
}

RdmaDevice look_at(ibv_device* device, ibv_context* context) {
  RdmaDevice found;
  found.name = device->name;
  ibv_device_attr attributes{};
  if (::ibv_query_device(context, &attributes) != 0) return found;
  found.firmware = attributes.fw_ver;
  found.max_qp = static_cast<std::uint32_t>(attributes.max_qp);
  found.max_cqe = static_cast<std::uint32_t>(attributes.max_cqe);
  found.max_srq_wr = static_cast<std::uint32_t>(attributes.max_srq_wr);
  found.numa_node = numa_node_of(device->ibdev_path);
  const auto gids = read_gids(context);
  for (unsigned number = 1; number <= attributes.phys_port_cnt; ++number) {
    ibv_port_attr port{};
    if (ibv_query_port(context, static_cast<std::uint8_t>(number), &port) != 0) continue;
    RdmaPort& one = found.ports.emplace_back();
    one.number = number;
    one.active = port.state == IBV_PORT_ACTIVE;
    one.state = ::ibv_port_state_str(port.state);
    one.link_layer = port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
    one.mtu = 128U << port.active_mtu;
    one.speed = port_speed(port.active_width, port.active_speed);
    one.largest_message = port.max_msg_sz;
    for (const ibv_gid_entry& gid : gids) {
      if (gid.port_num != number) continue;
      GidEntry& entry = one.gids.emplace_back();
      entry.device = found.name;
      entry.port = number;
      entry.index = gid.gid_index;
      entry.type = type_of(gid.gid_type);
      std::memcpy(entry.gid.data(), gid.gid.raw, entry.gid.size());
      entry.interface = interface_name(gid.ndev_ifindex);
      if (entry.type == GidType::kInfiniBand) {
        std::tie(entry.interface, entry.address) = ip_interface_of(device->ibdev_path, number);
      } else {
        entry.address = ip_of(entry.gid);
      }
      entry.port_active = one.active;
    }
  }
  return found;
}

}  // namespace

std::vector<RdmaDevice> list_rdma_devices() {
  std::vector<RdmaDevice> devices;
  if (!rdma_libraries().ready) return devices;
  int count = 0;
  const DeviceList list(::ibv_get_device_list(&count));
  for (int i = 0; list && i < count; ++i) {
    const VerbsContext context(::ibv_open_device(list.get()[i]));
    if (context) devices.push_back(look_at(list.get()[i], context.get()));
  }
  return devices;
}

VerbsContext open_rdma_device(const std::string& name) {
  int count = 0;
  const DeviceList list(::ibv_get_device_list(&count));
  for (int i = 0; list && i < count; ++i) {
    if (name != list.get()[i]->name) continue;
    VerbsContext context(::ibv_open_device(list.get()[i]));
    if (!context) throw_errno("cannot open the RDMA device " + name, "`bps doctor` shows what is wrong with it");
    return context;
  }
  throw Error(ErrorCode::kTransport, "there is no RDMA device " + name, "`rdma link` shows the devices");
}

bool is_removed(const ibv_context& context) {
  return ::access(context.device->dev_path, F_OK) != 0 && errno == ENOENT;
}

void let_go(ibv_context& context) {
  const Fd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!nothing) return;
  for (const int fd : {context.cmd_fd, context.async_fd}) {
    if (fd >= 0) ::dup3(nothing.get(), fd, O_CLOEXEC);
  }
}

RdmaReport rdma_report() {
  RdmaReport report;
  const RdmaLibraries& libraries = rdma_libraries();
  report.built_in = true;
  report.libraries = libraries.ready;
  report.verbs_library = libraries.verbs;
  report.cm_library = libraries.cm;
  report.why_not = libraries.why_not;
  report.hint = libraries.hint;
  report.devices = list_rdma_devices();
  return report;
}

}  // namespace bps::transport::rdma
