// SPDX-License-Identifier: Apache-2.0
#include "van/select.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include "core/error.h"
#include "core/words.h"

namespace bps::van {

using transport::Kind;

const Bytes* address_of(const Node& node, Kind kind) {
  for (const TransportAddress& address : node.addresses) {
    if (transport::parse_kind(address.transport) == kind) return &address.address;
  }
  return nullptr;
}

std::vector<Kind> allowed_transports(const std::string& setting) {
  if (setting == "auto" || setting.empty()) return {Kind::kShm, Kind::kRdma, Kind::kTcp};
  if (setting == "1" || setting == "ibverbs") return {Kind::kRdma};
  if (setting == "0" || setting == "zmq") return {Kind::kShm, Kind::kTcp};
  std::vector<Kind> allowed;
  for_each_part(setting, ',', [&](std::string_view name) {
    const auto kind = transport::parse_kind(name);
    if (!kind || kind == Kind::kSelf) {
      throw Error(ErrorCode::kInvalidArgument, "BPS_TRANSPORT='" + setting + "' is not a list of transports",
                  "set it to auto, shm, tcp or rdma, or to several of these, separated by commas");
    }
    allowed.push_back(*kind);
  });
  return allowed;
}

namespace {

// Returns why `kind` cannot connect the two nodes, or "".
std::string why_not(Kind kind, const Node& from, const Node& to) {
  const bool listens = address_of(to, kind) != nullptr;
  switch (kind) {
    case Kind::kShm:
      if (listens && from.host_key == to.host_key) return "";
      return "shm: it is on another host or in another network namespace";
    case Kind::kRdma:
      if (listens && address_of(from, kind) != nullptr) return "";
      return std::string("rdma: ") + (listens ? "this process" : "it") + " has none";
    case Kind::kTcp:
    case Kind::kSelf: break;
  }
  return "";
}

}  // namespace

Kind select_transport(std::span<const Kind> allowed, const Node& from, const Node& to) {
  if (from.id == to.id) return Kind::kSelf;
  std::string reasons;
  for (const Kind kind : allowed) {
    const std::string why = why_not(kind, from, to);
    if (why.empty()) return kind;
    reasons += (reasons.empty() ? "" : "; ") + why;
  }
  throw Error(ErrorCode::kUnreachable, to.describe() + " cannot be reached (" + reasons + ")",
              "set BPS_TRANSPORT=auto or tcp; `bps doctor` there says why it has no RDMA");
}

bool share_loopback(const Node& a, const Node& b) {
  // The key is compared without the part by which the user tells hosts apart.
  const auto place = [](const std::string& key) { return key.substr(0, key.find(' ', key.find(' ') + 1)); };
  return place(a.host_key) == place(b.host_key);
}

std::string host_key(const std::string& host_id) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> ns{};
  [[maybe_unused]] const auto n = ::readlink("/proc/self/ns/net", ns.data(), ns.size() - 1);
  return boot + " " + ns.data() + (host_id.empty() ? "" : " " + host_id);
}

}  // namespace bps::van
