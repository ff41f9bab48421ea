// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/private_data.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "core/bytes.h"
#include "core/hmac.h"

namespace bps::transport::rdma {
namespace {

// Each use of the secret has a label of its own, so that no message can stand for another.
constexpr std::string_view kClient = "rdma client";
constexpr std::string_view kServer = "rdma server";

Mac sign(const Credentials& credentials, std::string_view label, std::span<const std::byte> message,
         const Nonce& server_nonce) {
  return hmac_sha256(credentials.key, {as_bytes(label), message, server_nonce, credentials.job});
}

ShortMac sign_request(const Credentials& credentials, std::span<const std::byte> request, const Nonce& server_nonce) {
  const Mac whole = sign(credentials, kClient, request.first(sizeof(RequestData) - sizeof(ShortMac)), server_nonce);
  ShortMac mac{};
  std::copy_n(whole.begin(), mac.size(), mac.begin());
  return mac;
}

ShortJobId shortened(const JobId& whole) {
  ShortJobId job{};
  std::copy_n(whole.begin(), job.size(), job.begin());
  return job;
}

}  // namespace

RequestData make_request(const Hello& hello, const Credentials& credentials, const Nonce& nonce,
                         const Nonce& server_nonce) {
  Request request{.preamble = Preamble(RdmaKind::kRequest, hello.plane),
                  .hello = hello,
                  .job = shortened(credentials.job),
                  .nonce = nonce};
  request.mac = sign_request(credentials, codec::encode(request), server_nonce);
  return codec::encode(request);
}

Judgement judge_request(std::span<const std::byte> bytes, const Credentials& credentials, const Nonce& server_nonce) {
  Judgement judgement;
  const auto preamble = codec::decode_front<Preamble>(bytes);
  if (!preamble || !preamble->is(RdmaKind::kRequest)) return judgement;
  const auto refuse = [&](Refusal why) {
    judgement.verdict = Judgement::Verdict::kRefused;
    judgement.refusal = why;
    return judgement;
  };
  if (preamble->version != kProtocolVersion) return refuse(Refusal::kVersion);
  const auto request = codec::decode_front<Request>(bytes);
  if (!request) return judgement;
  if (request->job != shortened(credentials.job)) return refuse(Refusal::kJob);
  if (!equal_constant_time(request->mac, sign_request(credentials, bytes, server_nonce))) {
    return refuse(Refusal::kSecret);
  }
  judgement.verdict = Judgement::Verdict::kAccepted;
  judgement.hello = request->hello;
  judgement.hello.plane = Plane{preamble->detail};
  judgement.nonce = request->nonce;
  return judgement;
}

ReplyData make_reply(const RequestData& request, const Credentials& credentials, const Nonce& server_nonce) {
  return codec::encode(Reply{Preamble(RdmaKind::kReply), sign(credentials, kServer, request, server_nonce)});
}

bool is_proof(std::span<const std::byte> reply, const RequestData& request, const Credentials& credentials,
              const Nonce& server_nonce) {
  const auto read = codec::decode_front<Reply>(reply);
  return read && equal_constant_time(read->mac, sign(credentials, kServer, request, server_nonce));
}

RefusalData make_refusal(Refusal reason) {
  return codec::encode(Preamble(RdmaKind::kRefusal, reason));
}

std::optional<RefusalRead> read_refusal(std::span<const std::byte> bytes) {
  const auto preamble = codec::decode_front<Preamble>(bytes);
  if (!preamble || !preamble->is(RdmaKind::kRefusal)) return std::nullopt;
  const Refusal reason{preamble->detail};
  const bool known = reason >= Refusal::kVersion && reason <= Refusal::kSecret;
  return RefusalRead{known ? reason : Refusal::kSilent, preamble->version};
}

std::size_t NonceMemory::Hash::operator()(const Nonce& nonce) const {
  std::size_t first = 0;  // the nonce is random already
  std::memcpy(&first, nonce.data(), sizeof first);
  return first;
}

bool NonceMemory::remember(const Nonce& nonce) {
  return seen_.size() < kMost && seen_.insert(nonce).second;
}

}  // namespace bps::transport::rdma
