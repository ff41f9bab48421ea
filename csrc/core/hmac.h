// SPDX-License-Identifier: Apache-2.0
// Computes SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), and takes random bytes from the kernel.
//
// These are our own lines, against the rule, because the wheel must not carry or need a crypto library: the platform's
// is not on the list of libraries that wheels may link, and a second copy of it in torch's process is a version war.
// They are checked with the NIST and RFC 4231 vectors, and used for set-up and control messages, never for payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace bps {

using Digest = std::array<std::byte, 32>;

// Hashes a message that comes in parts.
class Sha256 {
 public:
  static constexpr std::size_t kBlock = 64;

  Sha256();
  void update(std::span<const std::byte> bytes);
  Digest finish();  // is called once

 private:
  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, kBlock> block_{};  // the last bytes, while they do not fill a block
  std::uint64_t size_ = 0;
};

// Holds a key that signs many messages: what depends on the key alone is computed once. Copying it is cheap.
class HmacKey {
 public:
  explicit HmacKey(std::span<const std::byte> key);
  // Returns the code of all parts, one after the other. Allocates nothing.
  Digest sign(std::initializer_list<std::span<const std::byte>> parts) const;

 private:
  Sha256 inner_;
  Sha256 outer_;
};

Digest sha256(std::span<const std::byte> message);
Digest hmac_sha256(std::span<const std::byte> key, std::initializer_list<std::span<const std::byte>> parts);

// Takes the same time wherever the two differ. Spans of unequal length are unequal.
bool equal_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

// Throws when the kernel gives no random bytes.
void random_bytes(std::span<std::byte> out);

}  // namespace bps
