// SPDX-License-Identifier: Apache-2.0
// Describes the rails of tcp: network interfaces, each with an address, and what a process publishes of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bps::transport::tcp {

// Describes a rail of this process.
struct TcpRail {
  std::string address;      // numeric, or a name
  std::string interface;    // "" when unknown
  std::uint32_t speed = 0;  // in Mbit/s; 0: unknown
};

// Describes a rail of a peer: where its listener is.
struct TcpAddress {
  std::string host;
  std::uint16_t port = 0;
  std::uint32_t speed = 0;
  bool operator==(const TcpAddress&) const = default;
};

// Writes host, port and speed of each rail: "10.0.0.1 4711 25000,10.1.0.1 4712 10000".
std::string to_text(std::span<const TcpAddress> addresses);
// Returns nothing when the text is not of that form, or names no rail or too many.
std::optional<std::vector<TcpAddress>> parse_addresses(std::string_view text);

// Writes the same for people: "10.0.0.1 4711, 10.1.0.1 4712".
std::string in_words(std::string_view text);

}  // namespace bps::transport::tcp
