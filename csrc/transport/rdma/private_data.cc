#include "transport/rdma/private_data.h"

#include <algorithm>
#include <cstring>

#include "core/bytes.h"
#include "core/hmac.h"

namespace bps {
namespace {

constexpr std::uint32_t kMagic = 0x44'53'50'42;  // "BPSD"; the sockets' hello starts with BPSR
constexpr std::size_t kHeaderSize = 8;           // magic, version, kind, detail: the same in every version
constexpr std::size_t kJobSize = 8;
constexpr std::size_t kMacSize = 16;  // of 32: half of the HMAC is still 128 bits to guess
constexpr std::size_t kSignedSize = kRequestSize - kMacSize;
static_assert(kHeaderSize + 8 + kJobSize + sizeof(Nonce) == kSignedSize, "the layout fills the request");

enum Kind : std::uint8_t { kRequest = 1, kReply = 2, kRefused = 3 };

void put_header(Writer& out, Kind kind, std::uint8_t detail) {
  out.put(kMagic).put(kProtocolVersion).put(static_cast<std::uint8_t>(kind)).put(detail);
}

// Each use of the secret under its own label, so that no message can stand for another.
Digest sign(const Credentials& credentials, std::string_view label, std::span<const std::byte> said,
            const Nonce& server_nonce) {
  Writer out;
  out.put_raw(as_bytes(label)).put_raw(said).put_raw(server_nonce).put_raw(credentials.job);
  return hmac_sha256(credentials.secret, out.take());
}

template <typename Array>
Array as_array(const Bytes& bytes) {
  Array array{};
  std::copy_n(bytes.begin(), array.size(), array.begin());
  return array;
}

}  // namespace

RequestData make_request(const Hello& hello, const Credentials& credentials, const Nonce& nonce,
                         const Nonce& server_nonce) {
  Writer out;
  put_header(out, kRequest, static_cast<std::uint8_t>(hello.plane));
  out.put(hello.node).put(hello.lane).put(hello.shard);
  out.put_raw(std::span(credentials.job).first(kJobSize)).put_raw(nonce);
  Bytes said = out.take();
  const Digest mac = sign(credentials, "rdma client", said, server_nonce);
  said.insert(said.end(), mac.begin(), mac.begin() + kMacSize);
  return as_array<RequestData>(said);
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
  judgement.hello.lane = in.get<std::uint16_t>();
  judgement.hello.shard = in.get<std::uint16_t>();
  const auto job = in.get_raw(kJobSize);
  const auto nonce = in.get_raw(sizeof(Nonce));
  const auto mac = in.get_raw(kMacSize);
  if (!in.ok()) return judgement;
  if (!std::ranges::equal(job, std::span(credentials.job).first(kJobSize))) return refuse(Refusal::kJob);
  const Digest expected = sign(credentials, "rdma client", bytes.first(kSignedSize), server_nonce);
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
  Writer out;
  put_header(out, kReply, 0);
  out.put_raw(sign(credentials, "rdma server", request, server_nonce));
  return as_array<ReplyData>(out.take());
}

bool is_proof(std::span<const std::byte> reply, const RequestData& request, const Credentials& credentials,
              const Nonce& server_nonce) {
  return reply.size() >= kReplySize &&
         equal_constant_time(reply.first(kReplySize), make_reply(request, credentials, server_nonce));
}

RefusalData make_refusal(Refusal reason) {
  Writer out;
  put_header(out, kRefused, static_cast<std::uint8_t>(reason));
  return as_array<RefusalData>(out.take());
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

}  // namespace bps
