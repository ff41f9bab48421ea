// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/private_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "concatenate.h"
#include "core/bytes.h"
#include "core/hmac.h"
#include "transport/rdma/listener_address.h"

namespace bps::transport::rdma {
namespace {

using Verdict = Judgement::Verdict;

Nonce nonce(unsigned seed) {
  std::mt19937 random(seed);
  Nonce bytes{};
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

const Credentials kJob = Credentials::from("job", "secret");
const Nonce kServer = nonce(99);

TEST(PrivateData, ARequestRoundTripsHoweverItIsPadded) {
  std::mt19937 random(1);
  for (unsigned i = 0; i < 500; ++i) {
    const Hello hello{static_cast<std::uint32_t>(random()), static_cast<std::uint16_t>(random()),
                      static_cast<std::uint16_t>(random()), random() % 2 == 0 ? Plane::kControl : Plane::kData,
                      static_cast<std::uint16_t>(random()), static_cast<std::uint16_t>(random())};
    const auto request = make_request(hello, kJob, nonce(i), kServer);
    Bytes padded(request.begin(), request.end());
    padded.resize(padded.size() + random() % 40);
    const Judgement judged = judge_request(padded, kJob, kServer);
    ASSERT_EQ(judged.verdict, Verdict::kAccepted);
    EXPECT_EQ(judged.hello.node, hello.node);
    EXPECT_EQ(judged.hello.client_loop, hello.client_loop);
    EXPECT_EQ(judged.hello.server_loop, hello.server_loop);
    EXPECT_EQ(judged.hello.plane, hello.plane);
    EXPECT_EQ(judged.hello.path, hello.path);
    EXPECT_EQ(judged.hello.stream, hello.stream);
    EXPECT_EQ(judged.nonce, nonce(i));
    EXPECT_TRUE(is_proof(make_reply(request, kJob, kServer), request, kJob, kServer));
  }
}

TEST(PrivateData, AnyChangedBitIsRefused) {
  const auto good = make_request({7, 1, 2, Plane::kData}, kJob, nonce(1), kServer);
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_NE(judge_request(bad, kJob, kServer).verdict, Verdict::kAccepted) << "bit " << bit;
  }
  const auto reply = make_reply(good, kJob, kServer);
  for (std::size_t bit = 0; bit < reply.size() * 8; ++bit) {
    auto bad = reply;
    bad[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(is_proof(bad, good, kJob, kServer)) << "bit " << bit;
  }
}

TEST(PrivateData, GoldenBytes) {
  const auto request =
      make_request({0x01020304, 0x0506, 0x0708, Plane::kData, 0x0102, 0x0304}, kJob, nonce(1), kServer);
  EXPECT_EQ(as_text(std::span(request).first(20)), std::string_view("BPSD\x15\0\x01\x02\4\3\2\1\6\5\10\7\2\1\4\3", 20));
  EXPECT_TRUE(std::ranges::equal(std::span(request).subspan(20, 4), std::span(kJob.job).first(4)));
  EXPECT_TRUE(std::ranges::equal(std::span(request).subspan(24, 16), nonce(1)));
  const Bytes said = concatenate({as_bytes("rdma client"), std::span(request).first(40), kServer, kJob.job});
  const Digest mac = hmac_sha256(kJob.key, {said});
  EXPECT_TRUE(std::ranges::equal(std::span(request).subspan(40), std::span(mac).first(16)));
  EXPECT_EQ(as_text(make_refusal(Refusal::kJob)), std::string_view("BPSD\x15\0\x03\x02", 8));
  const ReplyData reply = make_reply(request, kJob, kServer);
  EXPECT_EQ(as_text(std::span(reply).first(8)), std::string_view("BPSD\x15\0\x02\0", 8));
}

TEST(PrivateData, AListenersAddressRoundTrips) {
  const ListenerAddress address{nonce(4), {{"10.0.0.1", 4711}, {"fe80::1%eth0", 1}}};
  const Bytes bytes = codec::encode(address);
  EXPECT_EQ(codec::decode<ListenerAddress>(bytes), address);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(codec::decode<ListenerAddress>(std::span(bytes).first(size))) << size;
  }
  EXPECT_FALSE(codec::decode<ListenerAddress>(codec::encode(ListenerAddress{nonce(4), {}}))) << "no rail";
  EXPECT_FALSE(codec::decode<ListenerAddress>(codec::encode(ListenerAddress{nonce(4), {{"", 1}}}))) << "no host";
  EXPECT_FALSE(codec::decode<ListenerAddress>(codec::encode(ListenerAddress{nonce(4), {{"a", 0}}}))) << "no port";
  EXPECT_EQ(address.describe().substr(32), " 10.0.0.1 4711 fe80::1%eth0 1");
  EXPECT_EQ(address.describe().find_first_not_of("0123456789abcdef"), 32U);
}

TEST(PrivateData, UnauthenticatedPeersAndRefusals) {
  const auto request = make_request({7, 1, 2, Plane::kData}, kJob, nonce(1), kServer);
  for (std::size_t size = 0; size < request.size(); ++size) {
    EXPECT_NE(judge_request(std::span(request).first(size), kJob, kServer).verdict, Verdict::kAccepted);
  }
  const auto refused = [&](const Credentials& credentials, const Nonce& server) {
    const Judgement judged = judge_request(request, credentials, server);
    EXPECT_EQ(judged.verdict, Verdict::kRefused);
    return judged.refusal;
  };
  EXPECT_EQ(refused(Credentials::from("job", "other"), kServer), Refusal::kSecret);
  EXPECT_EQ(refused(Credentials::from("other", "secret"), kServer), Refusal::kJob);
  EXPECT_EQ(refused(kJob, nonce(5)), Refusal::kSecret) << "made for another server";
  auto newer = request;
  newer[4] ^= std::byte{0x40};
  EXPECT_EQ(judge_request(newer, kJob, kServer).refusal, Refusal::kVersion);
  const auto read = read_refusal(make_refusal(Refusal::kVersion));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->reason, Refusal::kVersion);
  EXPECT_EQ(read->version, kProtocolVersion);
  EXPECT_FALSE(read_refusal(request));
}

TEST(PrivateData, GarbageIsNeverAccepted) {
  std::mt19937 random(3);
  for (int i = 0; i < 20000; ++i) {
    Bytes bytes(random() % 100);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    EXPECT_NE(judge_request(bytes, kJob, kServer).verdict, Verdict::kAccepted);
    (void)read_refusal(bytes);
  }
}

TEST(PrivateData, ANonceIsGoodOnce) {
  NonceMemory memory;
  EXPECT_TRUE(memory.remember(nonce(1)));
  EXPECT_TRUE(memory.remember(nonce(2)));
  EXPECT_FALSE(memory.remember(nonce(1)));
  for (unsigned i = 0; i < NonceMemory::kMost; ++i) {
    Nonce n{};
    std::memcpy(n.data(), &i, sizeof i);
    memory.remember(n);
  }
  EXPECT_FALSE(memory.remember(nonce(3))) << "full: nobody enters, rather than somebody twice";
}

}  // namespace
}  // namespace bps::transport::rdma
