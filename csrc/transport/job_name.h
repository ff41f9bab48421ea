// SPDX-License-Identifier: Apache-2.0
// Tells a client the name of the server's job when it is of another job, so that an error can name both. The name is
// encrypted by a key that follows from the secret alone, so that only a client with the same secret reads it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "core/codec.h"
#include "transport/handshake.h"
#include "transport/handshake_messages.h"

namespace bps::transport {

// The server sends this after a refusal with Refusal::kJob.
struct SealedName {
  Nonce nonce{};
  std::array<std::byte, 64> text{};  // encrypted; zeros follow the name, and a longer one is cut
  Mac mac{};
  static constexpr void fields(auto& io, auto& m) { io(m.nonce, m.text, m.mac); }
};
static_assert(codec::kSize<SealedName> == 112, "part of the protocol");

SealedName seal_name(const Credentials& credentials, std::span<const std::byte> hello);
// Returns nothing where the server has another secret.
std::optional<std::string> open_name(const Credentials& credentials, std::span<const std::byte> hello,
                                     const SealedName& sealed);

}  // namespace bps::transport
