// SPDX-License-Identifier: Apache-2.0
// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), and random bytes from the kernel.
//
// Own lines, against the rule, because the wheel must not carry or need a crypto library: the platform's is not on the
// list of libraries that wheels may link, and a second copy of it in torch's process is a version war. Checked with the
// NIST and RFC 4231 vectors. Used for connection set-up only.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace bps {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> message);
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Takes the same time wherever the two differ. Unequal lengths are unequal.
bool equal_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

// Throws when the kernel gives none.
void random_bytes(std::span<std::byte> out);

}  // namespace bps
