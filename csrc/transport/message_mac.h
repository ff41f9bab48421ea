// SPDX-License-Identifier: Apache-2.0
// Authenticates the messages of one connection: each carries a code over its number, its length and its bytes.
//
// Each direction has a key of its own, and both sides count the messages. So no message can be changed, left out,
// repeated, reordered or sent back. The content of messages is not encrypted.
//
// A message of more than kSignedWhole bytes is hashed, and its code is over its SHA-256. So what the scheduler tells
// thousands of members is hashed once.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "core/bytes.h"
#include "core/hmac.h"

namespace bps::transport {

using MessageMac = std::array<std::byte, 16>;  // half of an HMAC-SHA-256, as IPsec has it (RFC 4868)

constexpr std::size_t kSignedWhole = 256;

// Signs one direction of a connection.
class MessageSigner {
 public:
  MessageSigner(const Digest& connection, std::string_view direction)
      : key_(hmac_sha256(connection, {as_bytes(direction)})) {}

  // Makes the code of the next message, whose bytes follow their length.
  MessageMac sign(std::span<const std::byte> length_and_bytes) {
    if (length_and_bytes.size() > kSignedWhole) return sign(sha256(length_and_bytes));
    return sign_parts({next_number(), length_and_bytes});
  }
  // Does the same for more than kSignedWhole bytes, given their digest. No length of a message reads as the word does.
  MessageMac sign(const Digest& of_length_and_bytes) {
    return sign_parts({next_number(), as_bytes("digest"), of_length_and_bytes});
  }

 private:
  std::span<const std::byte> next_number() {
    number_ = next_++;
    return std::as_bytes(std::span(&number_, 1));
  }
  MessageMac sign_parts(std::initializer_list<std::span<const std::byte>> parts) const {
    const Digest whole = key_.sign(parts);
    MessageMac mac{};
    std::copy_n(whole.begin(), mac.size(), mac.begin());
    return mac;
  }

  HmacKey key_;
  std::uint64_t number_ = 0;  // that of the last message
  std::uint64_t next_ = 0;
};

// Holds the keys of both directions, as one side sees them. `key` is that of the connection (Session::key).
struct MessageKeys {
  MessageSigner sent;
  MessageSigner received;

  static MessageKeys of_client(const Digest& key) { return {{key, "to server"}, {key, "to client"}}; }
  static MessageKeys of_server(const Digest& key) { return {{key, "to client"}, {key, "to server"}}; }
};

}  // namespace bps::transport
