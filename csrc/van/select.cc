#include "van/select.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include "core/error.h"

namespace bps {

const Bytes* address_of(const Node& node, const std::string& transport) {
  for (const TransportAddress& address : node.addresses) {
    if (address.transport == transport) return &address.address;
  }
  return nullptr;
}

std::string select_transport(const std::string& setting, const Node& from, const Node& to) {
  if (from.id == to.id) return "self";
  const bool same_host = from.host_key == to.host_key && address_of(to, "shm") != nullptr;
  const bool both_rdma = address_of(from, "rdma") != nullptr && address_of(to, "rdma") != nullptr;
  if (setting == "auto") return same_host ? "shm" : both_rdma ? "rdma" : "tcp";
  if (setting == "tcp") return "tcp";
  if (setting == "shm" && same_host) return "shm";
  if (setting == "rdma" && both_rdma) return "rdma";
  throw Error(ErrorCode::kUnreachable,
              to.describe() + " cannot be reached by " + setting +
                  (setting == "shm" ? ": it is on another host or in another network namespace"
                                    : ": this build has no RDMA transport on one of the two sides"),
              "set BPS_TRANSPORT=auto or tcp");
}

std::string host_key() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> ns{};
  [[maybe_unused]] const auto n = ::readlink("/proc/self/ns/net", ns.data(), ns.size() - 1);
  return boot + " " + ns.data();
}

}  // namespace bps
