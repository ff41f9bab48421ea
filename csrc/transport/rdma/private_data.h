// SPDX-License-Identifier: Apache-2.0
// Defines the handshake of an RDMA connection, which travels in the connection manager's messages. Unlike that of
// sockets (handshake.h) it has one request and one reply, and 56 bytes for the request.
//
//   request  magic, version, plane, node and loops, path and stream, 4 bytes of the job, 16 random bytes, HMAC over
//            these, the whole job, and the server's nonce
//   reply    magic, version, HMAC over the request and the server's nonce                 or   refusal with the reason
//
// The server's nonce is random, made when it starts to listen, and published with its address. So a request is valid
// for one server. It is valid only once, since the server remembers the random bytes of the requests it has accepted.
// Both sides prove that they know the secret. The functions are pure, over messages of fixed size.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <unordered_set>

#include "transport/handshake_messages.h"

namespace bps::transport::rdma {

using ShortJobId = std::array<std::byte, 4>;  // names the reason of a refusal; the HMAC covers all 16
using ShortMac = std::array<std::byte, 16>;   // half of the 32 bytes of the HMAC, still 128 bits to guess

struct Request {
  Preamble preamble{};  // detail: the plane
  Hello hello{};
  ShortJobId job{};
  Nonce nonce{};
  ShortMac mac{};  // last: it signs what comes before it
  static constexpr void fields(auto& io, auto& m) {
    io(m.preamble, m.hello, m.hello.path, m.hello.stream, m.job, m.nonce, m.mac);
    io.require([&] { return m.preamble.is_current(RdmaKind::kRequest); });
    io.require([&] { return Plane{m.preamble.detail} == Plane::kControl || Plane{m.preamble.detail} == Plane::kData; });
  }
};
struct Reply {
  Preamble preamble{};
  Mac mac{};
  static constexpr void fields(auto& io, auto& m) {
    io(m.preamble, m.mac);
    io.require([&] { return m.preamble.is_current(RdmaKind::kReply) && m.preamble.detail == 0; });
  }
};
// A refusal is a preamble alone.

using RequestData = std::array<std::byte, codec::kSize<Request>>;
using ReplyData = std::array<std::byte, codec::kSize<Reply>>;
using RefusalData = std::array<std::byte, codec::kSize<Preamble>>;
static_assert(sizeof(RequestData) == 56, "all that a request may carry in the port space TCP");

RequestData make_request(const Hello& hello, const Credentials& credentials, const Nonce& nonce,
                         const Nonce& server_nonce);

struct Judgement {
  enum class Verdict : std::uint8_t { kAccepted, kRefused, kUnauthenticated };  // the last one gets no answer
  Verdict verdict = Verdict::kUnauthenticated;
  Refusal refusal = Refusal::kSilent;
  Hello hello{};
  Nonce nonce{};
};
// `bytes` may be longer than what was sent, because the connection manager pads.
Judgement judge_request(std::span<const std::byte> bytes, const Credentials& credentials, const Nonce& server_nonce);

ReplyData make_reply(const RequestData& request, const Credentials& credentials, const Nonce& server_nonce);
// Returns true when the peer that sent this reply knows the secret and has read this very request.
bool is_proof(std::span<const std::byte> reply, const RequestData& request, const Credentials& credentials,
              const Nonce& server_nonce);

RefusalData make_refusal(Refusal reason);
struct RefusalRead {
  Refusal reason;
  std::uint16_t version;
};
std::optional<RefusalRead> read_refusal(std::span<const std::byte> bytes);

// Keeps the nonces of the requests that have been accepted. It is bounded. When it is full every further request is
// refused, because a server that forgot nonces would accept replays.
class NonceMemory {
 public:
  static constexpr std::size_t kMost = 1 << 17;  // 2 MiB of nonces; a job makes a few connections per pair of loops
  // Returns false for a nonce that is there already, or when the memory is full.
  bool remember(const Nonce& nonce);

 private:
  struct Hash {
    std::size_t operator()(const Nonce& nonce) const;
  };
  std::unordered_set<Nonce, Hash> seen_;
};

}  // namespace bps::transport::rdma
