// SPDX-License-Identifier: Apache-2.0
// Defines the messages of a handshake. They travel over sockets, and inside the connection manager's messages of RDMA.
//
// Every message has a fixed size, so that nothing from an unauthenticated peer is ever used as a length. Each starts
// with a preamble that is the same in all versions of the protocol, so that two versions recognise each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/codec.h"
#include "transport/handshake.h"

namespace bps::transport {

using Nonce = std::array<std::byte, 16>;
using Mac = Digest;  // HMAC-SHA-256

inline constexpr std::uint32_t kSocketMagic = 0x52'53'50'42;  // "BPSR"
inline constexpr std::uint32_t kRdmaMagic = 0x44'53'50'42;    // "BPSD"

enum class HandshakeKind : std::uint8_t { kHello = 1, kChallenge = 2, kWelcome = 3, kRefusal = 4 };
enum class RdmaKind : std::uint8_t { kRequest = 1, kReply = 2, kRefusal = 3 };

// A preamble is valid with any content. The receiver looks at magic, kind and version in turn, and so can name the
// reason when it refuses. `detail` is the plane of a hello or request, and the reason of a refusal.
struct Preamble {
  std::uint32_t magic = 0;
  std::uint16_t version = kProtocolVersion;
  std::uint8_t kind = 0;
  std::uint8_t detail = 0;

  constexpr Preamble() = default;
  constexpr explicit Preamble(HandshakeKind of) : magic(kSocketMagic), kind(static_cast<std::uint8_t>(of)) {}
  constexpr explicit Preamble(RdmaKind of) : magic(kRdmaMagic), kind(static_cast<std::uint8_t>(of)) {}
  template <typename Detail>
  constexpr Preamble(auto of, Detail with) : Preamble(of) {
    detail = static_cast<std::uint8_t>(with);
  }

  // Returns true for a message of this kind, in any version.
  constexpr bool is(auto of) const { return magic == Preamble(of).magic && kind == Preamble(of).kind; }
  constexpr bool is_current(auto of) const { return is(of) && version == kProtocolVersion; }

  static constexpr void fields(auto& io, auto& m) { io(m.magic, m.version, m.kind, m.detail); }
};

// The client sends this: which node asks for a connection, from which of its loops, and to which loop of the server.
struct ClientHello {
  Preamble preamble{};  // detail: the plane
  Hello hello{};
  JobId job{};
  Nonce nonce{};
  static constexpr void fields(auto& io, auto& m) {
    io(m.preamble, m.hello, m.hello.path, m.hello.stream, m.job, m.nonce);
    io.require([&] { return m.preamble.is_current(HandshakeKind::kHello) && is_valid(Plane{m.preamble.detail}); });
  }
};

// The server sends this: its random bytes, its view, and its proof that it knows the key.
struct Challenge {
  Preamble preamble{};
  Nonce nonce{};
  ViewId view{};
  Mac mac{};
  static constexpr void fields(auto& io, auto& m) {
    io(m.preamble, m.nonce, m.view, m.mac);
    io.require([&] { return m.preamble.is_current(HandshakeKind::kChallenge) && m.preamble.detail == 0; });
  }
};

// The client sends this: its proof that it knows the key.
struct Proof {
  Mac mac{};
  static constexpr void fields(auto& io, auto& m) { io(m.mac); }
};

// A Welcome or a Refusal, which the server sends, is a preamble alone.

static_assert(codec::kSize<Preamble> == 8 && codec::kSize<ClientHello> == 52, "part of the protocol");
static_assert(codec::kSize<Challenge> == 68 && codec::kSize<Proof> == 32, "part of the protocol");

}  // namespace bps::transport
