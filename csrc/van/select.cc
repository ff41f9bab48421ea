#include "van/select.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "core/error.h"

namespace bps::van {

const Bytes* address_of(const Node& node, const std::string& transport) {
  for (const TransportAddress& address : node.addresses) {
    if (address.transport == transport) return &address.address;
  }
  return nullptr;
}

std::vector<std::string> allowed_transports(const std::string& setting) {
  if (setting == "auto" || setting.empty()) return {"shm", "rdma", "tcp"};
  if (setting == "1" || setting == "ibverbs") return {"rdma"};
  if (setting == "0" || setting == "zmq") return {"shm", "tcp"};
  std::vector<std::string> allowed;
  for (std::size_t begin = 0; begin <= setting.size();) {
    const std::size_t end = std::min(setting.find(',', begin), setting.size());
    const std::string one = setting.substr(begin, end - begin);
    begin = end + 1;
    if (one != "shm" && one != "tcp" && one != "rdma") {
      throw Error(ErrorCode::kInvalidArgument, "BPS_TRANSPORT='" + setting + "' names no transport",
                  "set it to auto, shm, tcp or rdma, or to several of these, separated by commas");
    }
    allowed.push_back(one);
  }
  return allowed;
}

std::string select_transport(std::span<const std::string> allowed, const Node& from, const Node& to) {
  if (from.id == to.id) return "self";
  std::string why;
  for (const std::string& one : allowed) {
    const bool published = address_of(to, one) != nullptr;
    if (one == "shm" && (!published || from.host_key != to.host_key)) {
      why += (why.empty() ? "" : "; ") + std::string("shm: it is on another host or in another network namespace");
    } else if (one == "rdma" && (!published || address_of(from, one) == nullptr)) {
      why += (why.empty() ? "" : "; ") + std::string("rdma: ") + (published ? "this process" : "it") + " has none";
    } else {
      return one;
    }
  }
  throw Error(ErrorCode::kUnreachable, to.describe() + " cannot be reached (" + why + ")",
              "set BPS_TRANSPORT=auto or tcp; `bps doctor` there says why it has no RDMA");
}

std::string host_key() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> ns{};
  [[maybe_unused]] const auto n = ::readlink("/proc/self/ns/net", ns.data(), ns.size() - 1);
  return boot + " " + ns.data();
}

}  // namespace bps::van
