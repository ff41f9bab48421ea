// The hello of an RDMA connection: what the connection manager's messages carry for us. See handshake.h for the hello
// of sockets; here there is one question and one answer, and 56 bytes for the question.
//
//   request  magic, version, plane, who is calling, job, 16 random bytes, HMAC over these and the server's nonce
//   reply    magic, version, HMAC over the request and the server's nonce                 or   refusal with the reason
//
// The server's nonce is random, made when it starts to listen, and published with its address: a request is good for
// one server, and for one time, since the server remembers the random bytes it has seen. Both sides prove that they
// know the secret. Everything has a fixed size. Pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <unordered_set>

#include "transport/handshake.h"

namespace bps::transport::rdma {

inline constexpr std::size_t kRequestSize = 56;  // all that a request may carry in the port space TCP
inline constexpr std::size_t kReplySize = 40;
inline constexpr std::size_t kRefusalSize = 8;

using Nonce = std::array<std::byte, 16>;
using RequestData = std::array<std::byte, kRequestSize>;
using ReplyData = std::array<std::byte, kReplySize>;
using RefusalData = std::array<std::byte, kRefusalSize>;

RequestData make_request(const Hello& hello, const Credentials& credentials, const Nonce& nonce,
                         const Nonce& server_nonce);

struct Judgement {
  enum class Verdict : std::uint8_t { kWelcome, kRefused, kStranger };  // unauthenticated peers are told nothing
  Verdict verdict = Verdict::kStranger;
  Refusal refusal = Refusal::kSilent;
  Hello hello{};
  Nonce nonce{};
};
// `bytes` may be longer than what was sent: the connection manager pads.
Judgement judge_request(std::span<const std::byte> bytes, const Credentials& credentials, const Nonce& server_nonce);

ReplyData make_reply(const RequestData& request, const Credentials& credentials, const Nonce& server_nonce);
// Whether the reply is by somebody who knows the secret and read this very request.
bool is_proof(std::span<const std::byte> reply, const RequestData& request, const Credentials& credentials,
              const Nonce& server_nonce);

RefusalData make_refusal(Refusal reason);
struct RefusalRead {
  Refusal reason;
  std::uint16_t version;
};
std::optional<RefusalRead> read_refusal(std::span<const std::byte> bytes);

// Which requests have been answered. Bounded, and when it is full nobody enters any more: a server that forgot would
// open itself to replays.
class NonceMemory {
 public:
  static constexpr std::size_t kMost = 1 << 17;  // 2 MiB of nonces; a job makes a few connections per pair of loops
  // False for one that has been seen, or when full.
  bool remember(const Nonce& nonce);
  std::size_t size() const { return seen_.size(); }

 private:
  struct Hash {
    std::size_t operator()(const Nonce& nonce) const;
  };
  std::unordered_set<Nonce, Hash> seen_;
};

}  // namespace bps::transport::rdma
