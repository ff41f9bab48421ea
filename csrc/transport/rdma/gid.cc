// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/gid.h"

#include <arpa/inet.h>

#include <algorithm>
#include <tuple>

namespace bps::transport::rdma {
namespace {

// An IPv4 address written as IPv6 begins with these twelve bytes.
constexpr std::array<std::byte, 12> kIpv4Prefix{std::byte{0}, std::byte{0}, std::byte{0},    std::byte{0},
                                                std::byte{0}, std::byte{0}, std::byte{0},    std::byte{0},
                                                std::byte{0}, std::byte{0}, std::byte{0xff}, std::byte{0xff}};

std::string describe(const GidEntry& entry) {
  const std::string where = entry.interface.empty() ? "" : " of " + entry.interface;
  const bool local = entry.type != GidType::kInfiniBand && scope_of(entry.gid) == GidScope::kLinkLocal;
  const char* family = entry.address.find(':') == std::string::npos ? "IPv4 " : local ? "link-local " : "IPv6 ";
  return std::string(to_string(entry.type)) + ", " + family + entry.address + where;
}

// Compares field by field. Higher is better.
auto merit(const GidEntry& entry, const GidWish& wish) {
  return std::tuple(entry.port_active, !wish.address.empty() && entry.address == wish.address,
                    entry.type != GidType::kRoceV1, wish.names(entry.interface), scope_of(entry.gid));
}

}  // namespace

bool GidWish::names(const std::string& interface) const {
  return std::ranges::find(interfaces, interface) != interfaces.end();
}

const char* to_string(GidType type) {
  switch (type) {
    case GidType::kInfiniBand: return "InfiniBand";
    case GidType::kRoceV1: return "RoCE v1";
    case GidType::kRoceV2: return "RoCE v2";
  }
  return "?";
}

GidScope scope_of(const Gid& gid) {
  if (std::ranges::equal(std::span(gid).first<12>(), kIpv4Prefix)) {
    return gid[12] == std::byte{0} ? GidScope::kNull : GidScope::kIpv4;
  }
  if (gid[0] == std::byte{0xfe} && (gid[1] & std::byte{0xc0}) == std::byte{0x80}) {
    // The subnet prefix of InfiniBand is fe80:: too. It means nothing there, and is the same for all.
    return std::all_of(gid.begin() + 8, gid.end(), [](std::byte b) { return b == std::byte{0}; })
               ? GidScope::kNull
               : GidScope::kLinkLocal;
  }
  return std::ranges::all_of(gid, [](std::byte b) { return b == std::byte{0}; }) ? GidScope::kNull : GidScope::kGlobal;
}

std::string ip_of(const Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  switch (scope_of(gid)) {
    case GidScope::kNull: return "";
    case GidScope::kIpv4: ::inet_ntop(AF_INET, gid.data() + 12, text.data(), text.size()); break;
    default: ::inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
  }
  return text.data();
}

GidChoice choose_gid(std::span<const GidEntry> table, const GidWish& wish) {
  const GidEntry* best = nullptr;
  for (const GidEntry& entry : table) {
    if (entry.address.empty() || (wish.index && entry.index != *wish.index)) continue;
    if (best == nullptr || merit(entry, wish) > merit(*best, wish)) best = &entry;
  }
  if (best == nullptr) {
    if (table.empty()) return {nullptr, "the GID table is empty"};
    return {nullptr,
            wish.index ? "there is no GID with index " + std::to_string(*wish.index) : "no GID has an address"};
  }
  if (!best->port_active) {
    return {nullptr, "port " + std::to_string(best->port) + " of " + best->device + " is not active"};
  }
  std::string reason = describe(*best);
  if (wish.index) {
    reason += ", the index that was asked for";
  } else if (!wish.address.empty() && best->address == wish.address) {
    reason += ", the address of this process";
  } else if (wish.names(best->interface)) {
    reason += ", the interface that was asked for";
  } else if (best->type == GidType::kRoceV1) {
    reason += ", for want of RoCE v2";
  } else if (scope_of(best->gid) == GidScope::kLinkLocal && best->type != GidType::kInfiniBand) {
    reason += ", for want of a routable address";
  } else {
    reason += ", the best of " + std::to_string(table.size());
  }
  return {best, reason};
}

}  // namespace bps::transport::rdma
