// SPDX-License-Identifier: Apache-2.0
// Describes the address that an RDMA listener publishes so that others can connect: its nonce, and where each rail is.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/codec.h"
#include "core/error.h"
#include "transport/handshake_messages.h"
#include "transport/rails.h"

namespace bps::transport::rdma {

struct ListenerAddress {
  struct Entry {
    std::string host;
    std::uint16_t port = 0;
    std::uint32_t speed = 0;  // in Mbit/s; 0: unknown
    static constexpr void fields(auto& io, auto& m) {
      io.bounded(m.host, 256);
      io(m.port, m.speed);
      io.require([&] { return !m.host.empty() && m.port != 0; });
    }
    bool operator==(const Entry&) const = default;
  };
  Nonce nonce{};
  std::vector<Entry> entries;

  static constexpr void fields(auto& io, auto& m) {
    io(m.nonce, m.entries);
    io.require([&] { return !m.entries.empty() && m.entries.size() <= kMostRails; });
  }
  bool operator==(const ListenerAddress&) const = default;

  // Writes for the log: the nonce in hexadecimal digits, then hosts and ports.
  std::string describe() const {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const std::byte b : nonce) {
      text += kDigits[static_cast<unsigned>(b) >> 4];
      text += kDigits[static_cast<unsigned>(b) & 15];
    }
    for (const Entry& entry : entries) text += " " + entry.host + " " + std::to_string(entry.port);
    return text;
  }
};

}  // namespace bps::transport::rdma
