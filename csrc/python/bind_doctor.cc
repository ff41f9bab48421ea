// SPDX-License-Identifier: Apache-2.0
// Answers `bps doctor`, in plain dictionaries.
#include <pybind11/stl.h>
#include <sys/resource.h>

#include <utility>

#include "core/memory_watch.h"
#include "core/nearness.h"
#include "core/settings.h"
#include "node/local_address.h"
#include "node/near_gpu.h"
#include "node/tcp_rails.h"
#include "python/bind.h"
#include "python/interruptible.h"
#include "transport/rdma/rdma.h"
#include "transport/rdma/self_transfer.h"

namespace py = pybind11;
using namespace py::literals;

namespace bps::python {
namespace {

py::dict as_dict(const transport::rdma::Rail& rail) {
  return py::dict("device"_a = rail.device, "port"_a = rail.port, "gid_index"_a = rail.gid_index,
                  "type"_a = to_string(rail.type), "address"_a = rail.address, "interface"_a = rail.interface,
                  "speed"_a = rail.speed, "reason"_a = rail.reason);
}

py::dict as_dict(const transport::rdma::RdmaPort& port) {
  py::list gids;
  for (const transport::rdma::GidEntry& gid : port.gids) {
    gids.append(py::dict("index"_a = gid.index, "type"_a = to_string(gid.type), "address"_a = gid.address,
                         "interface"_a = gid.interface));
  }
  return py::dict("number"_a = port.number, "active"_a = port.active, "state"_a = port.state,
                  "link"_a = port.link_layer, "mtu"_a = port.mtu, "speed"_a = port.speed,
                  "largest_message"_a = port.largest_message, "gids"_a = gids);
}

struct Found {
  transport::rdma::RdmaReport report;
  transport::rdma::RdmaRails selection;
  std::vector<transport::tcp::TcpRail> tcp;
};

// Makes the choice that init() would make, with an address of this host in place of the route to a scheduler.
Found find(const Settings& settings) {
  Found found;
  const std::string& interfaces = settings.transport.interface;
  const std::string host = node::local_address(settings.transport.node_host, interfaces, settings.job.root_uri);
  found.selection = transport::rdma::find_rdma(
      node::rdma_options(settings, true),
      {.index = std::nullopt, .address = node::numeric_address(host), .interfaces = node::interface_names(interfaces)});
  found.report = transport::rdma::rdma_report();  // after the settings have named the library
  found.tcp = node::find_tcp_rails(settings.transport, settings.job.root_uri);
  return found;
}

}  // namespace

void bind_doctor(py::module_& module) {
  module.def("name_for_others", &node::name_for_others, py::arg("host"), py::call_guard<Interruptible>(),
             "This name or address, if it leads others to this host, else an address of this host that does.");
  module.def(
      "rdma_report",
      [](const SettingValues& config) {
        const Found found = [&] {
          const WithoutGil released;
          return find(config.parse());
        }();
        py::list devices;
        for (const transport::rdma::RdmaDevice& device : found.report.devices) {
          py::list ports;
          for (const transport::rdma::RdmaPort& port : device.ports) ports.append(as_dict(port));
          devices.append(py::dict("name"_a = device.name, "firmware"_a = device.firmware, "max_qp"_a = device.max_qp,
                                  "max_cqe"_a = device.max_cqe, "max_srq_wr"_a = device.max_srq_wr, "ports"_a = ports));
        }
        py::list rails;
        for (const transport::rdma::Rail& rail : found.selection.rails) rails.append(as_dict(rail));
        py::list tcp_rails;
        for (const transport::tcp::TcpRail& rail : found.tcp) {
          tcp_rails.append(
              py::dict("interface"_a = rail.interface, "address"_a = rail.address, "speed"_a = rail.speed));
        }
        return py::dict("built_in"_a = found.report.built_in, "libraries"_a = found.report.libraries,
                        "verbs_library"_a = found.report.verbs_library, "cm_library"_a = found.report.cm_library,
                        "devices"_a = devices, "rails"_a = rails, "tcp_rails"_a = tcp_rails,
                        "why_not"_a = found.selection.why_not, "hint"_a = found.selection.hint);
      },
      py::arg("config"),
      "Devices, ports and GIDs, and the rails that these settings choose, also of TCP; speeds in Mbit/s, 0: unknown.");
  module.def(
      "rdma_self_transfer",
      [](const SettingValues& config, std::size_t rail, std::uint64_t bytes, double timeout_s) {
        const transport::rdma::SelfTransfer done = [&] {
          const WithoutGil released;
          const Settings settings = config.parse();
          const transport::rdma::RdmaRails selection = find(settings).selection;
          if (rail >= selection.rails.size()) throw Error(ErrorCode::kUnreachable, selection.why_not, selection.hint);
          return transport::rdma::transfer_to_self(selection.rails[rail],
                                                   transport::rdma::RdmaOptions::from(settings.rdma), bytes, timeout_s);
        }();
        return py::dict("bytes"_a = done.bytes, "gigabytes_per_second"_a = done.gigabytes_per_second,
                        "round_trip_us"_a = done.round_trip_us);
      },
      py::arg("config"), py::arg("rail"), py::arg("bytes"), py::arg("timeout_s"),
      "Sends `bytes` bytes to this process over the NIC and compares them.");
  module.def(
      "local_address",
      [](const SettingValues& config, const std::string& towards) {
        const TransportSettings settings = config.parse().transport;
        const std::string address = node::local_address(settings.node_host, settings.interface, towards);
        if (!node::is_loopback(address) || !settings.node_host.empty() || !settings.interface.empty()) return address;
        try {
          return node::local_address("", "^=lo", towards);
        } catch (const Error&) {  // there is no other interface
          return address;
        }
      },
      py::arg("config"), py::arg("towards"), py::call_guard<WithoutGil>(),
      "The address of this host that its peers should use; without settings, that of the route to `towards`, or, where "
      "no route leads there, of the first interface that leads to other hosts.");
  module.def(
      "distance_of",
      [](const std::string& one, const std::string& other) {
        const Distance distance = distance_of(one, other);
        return std::pair(to_string(distance.nearness), distance.bridges);
      },
      py::arg("one"), py::arg("other"),
      "How near two devices are, of which these are the folders in sysfs: (\"switch\", \"root\", \"node\" or \"far\", "
      "how many bridges of PCI both are behind).");
  module.def(
      "memory_watch_obstacle",
      [] {
        const MemoryWatch::Obstacle obstacle = MemoryWatch::obstacle();
        return std::pair(obstacle.what, obstacle.hint);
      },
      "Why the kernel does not tell this process when memory is given back, and what to do about it; empty: it does.");
  module.def(
      "locked_memory_limit",
      []() -> std::optional<std::uint64_t> {
        rlimit limit{};
        if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
        return limit.rlim_cur;
      },
      "Bytes that this process may lock, or None for no limit.");
}

}  // namespace bps::python
