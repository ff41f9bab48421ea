#include "transport/rdma/private_data.h"

#include <algorithm>
#include <concepts>
#include <cstring>
#include <string_view>

#include "core/bytes.h"
#include "core/hmac.h"

namespace bps::transport::rdma {
namespace {

constexpr std::uint32_t kMagic = 0x44'53'50'42;  // "BPSD"; the sockets' hello starts with BPSR
constexpr std::size_t kHeaderSize = 8;           // magic, version, kind, detail: the same in every version
constexpr std::size_t kJobSize = 8;
constexpr std::size_t kMacSize = 16;  // of 32: half of the HMAC is still 128 bits to guess
constexpr std::size_t kSignedSize = kRequestSize - kMacSize;
static_assert(kHeaderSize + 8 + kJobSize + sizeof(Nonce) == kSignedSize, "the layout fills the request");

enum Kind : std::uint8_t { kRequest = 1, kReply = 2, kRefused = 3 };

// Fields one after the other, in a message whose size is known.
template <std::size_t Size>
class Layout {
 public:
  template <std::integral T>
  Layout& put(T value) {
    return put(std::as_bytes(std::span(&value, 1)));
  }
  Layout& put(std::span<const std::byte> bytes) {
    std::ranges::copy(bytes, bytes_.begin() + static_cast<std::ptrdiff_t>(size_));
    size_ += bytes.size();
    return *this;
  }
  Layout& put_header(Kind kind, std::uint8_t detail) {
    return put(kMagic).put(kProtocolVersion).put(static_cast<std::uint8_t>(kind)).put(detail);
  }
  std::span<const std::byte> said() const { return std::span(bytes_).first(size_); }
  const std::array<std::byte, Size>& whole() const { return bytes_; }

 private:
  std::array<std::byte, Size> bytes_{};
  std::size_t size_ = 0;
};

// Each use of the secret under its own label, so that no message can stand for another.
constexpr std::string_view kClient = "rdma client";
constexpr std::string_view kServer = "rdma server";

Digest sign(const Credentials& credentials, std::string_view label, std::span<const std::byte> said,
            const Nonce& server_nonce) {
  Layout<kClient.size() + kRequestSize + sizeof(Nonce) + sizeof credentials.job> all;
  all.put(as_bytes(label)).put(said).put(server_nonce).put(credentials.job);
  return hmac_sha256(credentials.secret, all.said());
}

}  // namespace

RequestData make_request(const Hello& hello, const Credentials& credentials, const Nonce& nonce,
                         const Nonce& server_nonce) {
  Layout<kRequestSize> request;
  request.put_header(kRequest, static_cast<std::uint8_t>(hello.plane));
  request.put(hello.node).put(hello.client_loop).put(hello.server_loop);
  request.put(std::span(credentials.job).first(kJobSize)).put(nonce);
  const Digest mac = sign(credentials, kClient, request.said(), server_nonce);
  return request.put(std::span(mac).first(kMacSize)).whole();
}

Judgement judge_request(std::span<const std::byte> bytes, const Credentials& credentials, const Nonce& server_nonce) {
  Judgement judgement;
  Reader in(bytes);
  const auto magic = in.get<std::uint32_t>();
  const auto version = in.get<std::uint16_t>();
  const auto kind = in.get<std::uint8_t>();
  const auto plane = in.get<std::uint8_t>();
  if (!in.ok() || magic != kMagic || kind != kRequest) return judgement;
  const auto refuse = [&](Refusal why) {
    judgement.verdict = Judgement::Verdict::kRefused;
    judgement.refusal = why;
    return judgement;
  };
  if (version != kProtocolVersion) return refuse(Refusal::kVersion);
  judgement.hello.node = in.get<std::uint32_t>();
  judgement.hello.client_loop = in.get<std::uint16_t>();
  judgement.hello.server_loop = in.get<std::uint16_t>();
  const auto job = in.get_raw(kJobSize);
  const auto nonce = in.get_raw(sizeof(Nonce));
  const auto mac = in.get_raw(kMacSize);
  if (!in.ok()) return judgement;
  if (!std::ranges::equal(job, std::span(credentials.job).first(kJobSize))) return refuse(Refusal::kJob);
  const Digest expected = sign(credentials, kClient, bytes.first(kSignedSize), server_nonce);
  if (!equal_constant_time(mac, std::span(expected).first(kMacSize))) return refuse(Refusal::kSecret);
  if (plane != static_cast<std::uint8_t>(Plane::kControl) && plane != static_cast<std::uint8_t>(Plane::kData)) {
    return judgement;
  }
  judgement.hello.plane = Plane{plane};
  std::ranges::copy(nonce, judgement.nonce.begin());
  judgement.verdict = Judgement::Verdict::kWelcome;
  return judgement;
}

ReplyData make_reply(const RequestData& request, const Credentials& credentials, const Nonce& server_nonce) {
  Layout<kReplySize> reply;
  return reply.put_header(kReply, 0).put(sign(credentials, kServer, request, server_nonce)).whole();
}

bool is_proof(std::span<const std::byte> reply, const RequestData& request, const Credentials& credentials,
              const Nonce& server_nonce) {
  return reply.size() >= kReplySize &&
         equal_constant_time(reply.first(kReplySize), make_reply(request, credentials, server_nonce));
}

RefusalData make_refusal(Refusal reason) {
  return Layout<kRefusalSize>().put_header(kRefused, static_cast<std::uint8_t>(reason)).whole();
}

std::optional<RefusalRead> read_refusal(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const auto magic = in.get<std::uint32_t>();
  const auto version = in.get<std::uint16_t>();
  const auto kind = in.get<std::uint8_t>();
  const auto reason = in.get<std::uint8_t>();
  if (!in.ok() || magic != kMagic || kind != kRefused) return std::nullopt;
  const bool known =
      reason >= static_cast<std::uint8_t>(Refusal::kVersion) && reason <= static_cast<std::uint8_t>(Refusal::kSecret);
  return RefusalRead{known ? Refusal{reason} : Refusal::kSilent, version};
}

std::size_t NonceMemory::Hash::operator()(const Nonce& nonce) const {
  std::size_t first = 0;  // random already
  std::memcpy(&first, nonce.data(), sizeof first);
  return first;
}

bool NonceMemory::remember(const Nonce& nonce) {
  return seen_.size() < kMost && seen_.insert(nonce).second;
}

}  // namespace bps::transport::rdma
