// SPDX-License-Identifier: Apache-2.0
// The rails of tcp: network interfaces, each with an address, and what a process publishes of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bps::transport::tcp {

// One of this process.
struct TcpRail {
  std::string address;      // numeric, or a name
  std::string interface;    // "" when unknown
  std::uint32_t speed = 0;  // in Mbit/s; 0: unknown
};

// One of a peer: where its listener is.
struct TcpAddress {
  std::string host;
  std::uint16_t port = 0;
  std::uint32_t speed = 0;
  bool operator==(const TcpAddress&) const = default;
};

// "10.0.0.1 4711 25000,10.1.0.1 4712 10000": host, port and speed of each rail.
std::string to_text(std::span<const TcpAddress> addresses);
// Nothing when the text is not of that form, or names no rail or too many.
std::optional<std::vector<TcpAddress>> parse_addresses(std::string_view text);

// The same for people: "10.0.0.1 4711, 10.1.0.1 4712".
std::string in_words(std::string_view text);

}  // namespace bps::transport::tcp
