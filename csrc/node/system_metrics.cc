// SPDX-License-Identifier: Apache-2.0
#include "node/system_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <system_error>

namespace bps::node {
namespace {

using Type = MetricFamily::Type;

constexpr double kWordBytes = 4;  // the unit of port_xmit_data and port_rcv_data, by the InfiniBand specification

std::optional<double> read_number(const std::filesystem::path& file) {
  std::ifstream in(file);
  double value = 0;
  if (!(in >> value)) return std::nullopt;
  return value;
}

// Returns the fields of /proc/self/stat that follow the name of the program, which may have spaces in it.
std::vector<double> stat_fields() {
  std::ifstream in("/proc/self/stat");
  std::string line;
  std::getline(in, line);
  std::istringstream rest(line.substr(std::min(line.size(), line.rfind(')') + 2)));
  std::string state;
  rest >> state;
  std::vector<double> fields;
  for (double field = 0; rest >> field;) fields.push_back(field);
  return fields;
}

std::optional<double> boot_time() {
  std::ifstream in("/proc/stat");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("btime ")) return std::stod(line.substr(6));
  }
  return std::nullopt;
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

std::optional<double> open_descriptors() {
  std::error_code error;
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  if (error) return std::nullopt;
  double count = -1;  // leaves out the descriptor that looks
  for (auto it = files; it != std::filesystem::directory_iterator() && !error; it.increment(error)) ++count;
  return count;
}

void add(MetricFamilies& families, Type type, const char* name, const char* help, std::optional<double> value) {
  if (!value) return;
  families.push_back({type, name, help});
  families.back().add(*value);
}

// Adds the counters of a port. Those of bytes have families of their own. The others are counts of events, which a
// label tells apart.
void add_port(const std::filesystem::path& port, const Labels& labels, MetricFamily& sent, MetricFamily& received,
              MetricFamily& events) {
  std::map<std::string, double> found;
  for (const char* folder : {"counters", "hw_counters"}) {
    std::error_code error;
    const std::filesystem::directory_iterator end;
    for (std::filesystem::directory_iterator it(port / folder, error); !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename();
      if (name == "lifespan") continue;  // it says how often the driver reads the counters
      if (const auto value = read_number(it->path())) found.emplace(name, *value);
    }
  }
  for (const auto& [name, value] : found) {
    if (name == "port_xmit_data") {
      sent.add(value * kWordBytes, labels);
    } else if (name == "port_rcv_data") {
      received.add(value * kWordBytes, labels);
    } else {
      Labels with_name = labels;
      with_name.emplace_back("counter", name);
      events.add(value, std::move(with_name));
    }
  }
}

}  // namespace

MetricFamilies process_families() {
  MetricFamilies families;
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) == 0) {
    add(families, Type::kCounter, "process_cpu_seconds_total", "Processor time that this process has used.",
        seconds(usage.ru_utime) + seconds(usage.ru_stime));
  }
  constexpr std::size_t kStart = 18;  // the fields from there on are the start time in ticks, virtual bytes, and pages
  const std::vector<double> stat = stat_fields();
  if (stat.size() <= kStart + 2) return families;
  if (const auto boot = boot_time()) {
    add(families, Type::kGauge, "process_start_time_seconds", "Start of this process, since 1970.",
        *boot + stat[kStart] / static_cast<double>(::sysconf(_SC_CLK_TCK)));
  }
  add(families, Type::kGauge, "process_virtual_memory_bytes", "Virtual memory of this process.", stat[kStart + 1]);
  add(families, Type::kGauge, "process_resident_memory_bytes", "Memory of this process that is resident.",
      stat[kStart + 2] * static_cast<double>(::sysconf(_SC_PAGESIZE)));
  add(families, Type::kGauge, "process_open_fds", "Open descriptors of this process.", open_descriptors());
  return families;
}

MetricFamilies rdma_port_families(const std::vector<RdmaPort>& ports, const std::string& root) {
  MetricFamily sent{Type::kCounter, "bps_rdma_port_sent_bytes_total",
                    "Bytes that an RDMA port has sent for all processes of the host, by device and port."};
  MetricFamily received{Type::kCounter, "bps_rdma_port_received_bytes_total",
                        "Bytes that an RDMA port has received for all processes of the host, by device and port."};
  MetricFamily events{Type::kCounter, "bps_rdma_port_events_total",
                      "What the driver counts at an RDMA port, by device, port and its own name of the counter, "
                      "such as out_of_sequence or local_ack_timeout_err."};
  for (const RdmaPort& port : ports) {
    const auto folder = std::filesystem::path(root) / port.device / "ports" / std::to_string(port.port);
    add_port(folder, {{"device", port.device}, {"port", std::to_string(port.port)}}, sent, received, events);
  }
  return {sent, received, events};
}

}  // namespace bps::node
