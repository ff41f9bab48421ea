// SPDX-License-Identifier: Apache-2.0
// Chooses an entry of the GID tables. It is a pure function of the tables and the user's wishes.
//
// An address of RDMA is a GID of 16 bytes. On Ethernet it is an IP address of the port's interface, in two versions of
// the protocol: RoCE v1, which no router forwards, and v2, which is UDP. A port shows each of its addresses in both.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bps::transport::rdma {

using Gid = std::array<std::byte, 16>;

enum class GidType : std::uint8_t { kInfiniBand, kRoceV1, kRoceV2 };
const char* to_string(GidType type);

enum class GidScope : std::uint8_t { kNull, kLinkLocal, kGlobal, kIpv4 };  // worst first
GidScope scope_of(const Gid& gid);
// Returns the IP address that a GID is: "10.98.0.1" or "fd00::1".
std::string ip_of(const Gid& gid);

struct GidEntry {
  std::string device;
  unsigned port = 1;
  unsigned index = 0;
  GidType type = GidType::kRoceV2;
  Gid gid{};
  // The connection manager binds to this address in order to use the GID. For RoCE it is the GID's own IP address, for
  // InfiniBand that of the port's IP interface. "": the GID cannot be used.
  std::string address;
  std::string interface;  // "" when it has none
  bool port_active = true;
};

struct GidWish {
  std::optional<unsigned> index;        // that of the user, obeyed to the letter
  std::string address;                  // the numeric address of this host that the rest of the job uses; may be empty
  std::vector<std::string> interfaces;  // those that the user named; may be empty
  bool names(const std::string& interface) const;
};

struct GidChoice {
  const GidEntry* entry = nullptr;  // null: no entry is usable
  std::string reason;               // for people, either way
};

// Chooses the best of `table`, in this order: the wished index; an active port; the wished address; RoCE v2 or
// InfiniBand before v1; the wished interface; IPv4, then global, then link-local addresses; the first.
GidChoice choose_gid(std::span<const GidEntry> table, const GidWish& wish);

}  // namespace bps::transport::rdma
