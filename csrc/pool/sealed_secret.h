// SPDX-License-Identifier: Apache-2.0
// Encrypts the secret of a job on its way to a pool.
//
// The secret is added, bit by bit, to HMAC-SHA-256(key of the connection, "secret of a job" | lease | block number).
// The key follows from the user's key and the random bytes of both sides, and a lease begins once: no such number is
// used twice. The code of the message shows that nothing was changed. Somebody who has recorded the connection and gets
// the user's key later can read the secret.
#pragma once

#include <cstdint>
#include <span>

#include "core/bytes.h"
#include "core/hmac.h"

namespace bps::pool {

inline Bytes seal_secret(const Digest& connection, std::uint64_t lease, std::span<const std::byte> secret) {
  const HmacKey key(connection);
  Bytes sealed(secret.begin(), secret.end());
  for (std::uint64_t block = 0; block * sizeof(Digest) < sealed.size(); ++block) {
    const Digest stream = key.sign(
        {as_bytes("secret of a job"), std::as_bytes(std::span(&lease, 1)), std::as_bytes(std::span(&block, 1))});
    for (std::size_t i = 0; i < stream.size() && block * stream.size() + i < sealed.size(); ++i) {
      sealed[block * stream.size() + i] ^= stream[i];
    }
  }
  return sealed;
}

}  // namespace bps::pool
