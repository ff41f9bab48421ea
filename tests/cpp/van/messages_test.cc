// SPDX-License-Identifier: Apache-2.0
#include "van/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "message_samples.h"

namespace bps::van {
namespace {

using test::message_samples;
using test::sample_node;

TEST(Messages, RoundTrip) {
  std::set<std::size_t> seen;
  for (const Message& message : message_samples()) {
    const auto back = decode(encode(message));
    ASSERT_TRUE(back.has_value()) << "type " << message.index();
    EXPECT_EQ(*back, message) << "type " << message.index();
    seen.insert(message.index());
  }
  EXPECT_EQ(seen.size(), std::variant_size_v<Message>) << "a type has no sample";
}

TEST(Messages, TypesKeepTheirNumbers) {
  EXPECT_EQ(static_cast<int>(encode(Join{})[0]), 0);
  EXPECT_EQ(static_cast<int>(encode(Heartbeat{})[0]), 3);
  EXPECT_EQ(static_cast<int>(encode(Declare{})[0]), 9);
  EXPECT_EQ(static_cast<int>(encode(PeerLost{})[0]), 18);
}

TEST(Messages, EveryTruncationAndExtensionIsRefused) {
  for (const Message& message : message_samples()) {
    Bytes bytes = encode(message);
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      EXPECT_FALSE(decode(std::span(bytes).first(length))) << "type " << message.index() << " cut to " << length;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode(bytes)) << "type " << message.index() << " with a byte too many";
  }
}

// Whatever comes in: no crash (the sanitizers watch), and what is accepted is exactly what encode() would have sent.
TEST(Messages, MutationsNeverBreakTheDecoder) {
  std::mt19937 random(20240229);
  std::vector<Bytes> seeds;
  for (const Message& message : message_samples()) seeds.push_back(encode(message));
  const auto below = [&](std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random);
  };
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    Bytes bytes = seeds[below(seeds.size())];
    for (std::size_t edits = below(4); edits > 0 && !bytes.empty(); --edits) {
      const std::size_t at = below(bytes.size());
      constexpr std::uint8_t kEdges[] = {0, 1, 0x7f, 0x80, 0xff};
      switch (below(5)) {
        case 0: bytes[at] = static_cast<std::byte>(below(256)); break;
        case 1: bytes[at] = static_cast<std::byte>(kEdges[below(5)]); break;
        case 2: bytes[at] ^= static_cast<std::byte>(1U << below(8)); break;
        case 3: bytes.resize(at); break;
        default: bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::byte>(below(256)));
      }
    }
    if (const auto message = decode(bytes)) {
      ++accepted;
      ASSERT_EQ(encode(*message), bytes);
    }
  }
  EXPECT_GT(accepted, 20'000);  // the mutations reach beyond the first check
}

TEST(Messages, CountsBeyondTheMessageAreRefused) {
  Bytes bytes = encode(Declare{1, {}});
  ASSERT_TRUE(decode(bytes));
  std::fill(bytes.end() - 4, bytes.end(), std::byte{0xff});
  EXPECT_FALSE(decode(bytes));
}

TEST(Messages, WhatNoMemberMaySayIsRefused) {
  const auto refused = [](const Message& message) { return !decode(encode(message)); };
  EXPECT_TRUE(refused(Declare{1, {{0, "w", 99, 1, "(1,)"}}})) << "unknown element type";
  EXPECT_TRUE(refused(Declare{1, {{0, "w", 0, kMostElements + 1, "(1,)"}}})) << "so many elements overflow";
  EXPECT_TRUE(refused(Declared{1, {{0, {}}}})) << "tensor ids start at 1";
  EXPECT_TRUE(refused(Declared{1, {{1U << 30, {}}}})) << "tensor ids have 30 bits";
  EXPECT_TRUE(refused(GroupInfo{{1, {}}})) << "an empty group";
  EXPECT_TRUE(refused(GroupInfo{{1, {2, 1}}})) << "ranks out of order";
  EXPECT_TRUE(refused(GroupInfo{{1, {1, 1}}})) << "a rank twice";
  EXPECT_TRUE(refused(Refused{ErrorCode{200}, "", ""})) << "unknown error code";
  EXPECT_TRUE(refused(Join{sample_node(0, -3, 0), 1, 1, 1})) << "rank below the wishes";
}

// What many nodes have in common is there once.
TEST(Messages, AMembershipOfThousandsIsSmall) {
  Welcome welcome{1500, 500, 77, {}};
  for (std::uint32_t i = 0; i < 4096; ++i) {
    Node node = sample_node(i + 1, static_cast<std::int32_t>(i), static_cast<std::int32_t>(i));
    node.host = "node-" + std::to_string(i / 8);
    node.host_key = std::string(60, static_cast<char>('a' + i / 8 % 26)) + node.host;
    node.identity = i + 1;
    welcome.membership.nodes.push_back(node);
  }
  welcome.membership.workers = welcome.membership.servers = 4096;
  const Bytes bytes = encode(welcome);
  EXPECT_LT(bytes.size(), 4096U * 200);
  EXPECT_EQ(decode(bytes), std::optional<Message>(welcome));
}

TEST(Messages, InconsistentMembershipsAreRefused) {
  const auto refused = [](auto change) {
    Welcome welcome{1500, 500, 77, {{sample_node(1, 0, 0), sample_node(2, 1, 1), sample_node(3, kNoRank, 2)}, 2, 3}};
    change(welcome);
    return !decode(encode(welcome));
  };
  EXPECT_FALSE(refused([](Welcome&) {}));
  EXPECT_TRUE(refused([](Welcome& w) { w.beat_ms = 0; }));
  EXPECT_TRUE(refused([](Welcome& w) { w.silence_ms = 0; }));
  EXPECT_TRUE(refused([](Welcome& w) { w.membership.workers = 4; }));
  EXPECT_TRUE(refused([](Welcome& w) { w.membership.servers = 2; }));
  EXPECT_TRUE(refused([](Welcome& w) { w.membership.nodes[1].server_rank = 0; }));
  EXPECT_TRUE(refused([](Welcome& w) { w.membership.nodes[2].server_rank = kNoRank; }));
  EXPECT_TRUE(refused([](Welcome& w) { w.membership.nodes[2].server_rank = 1 << 30; }));
}

TEST(Messages, LongTextsAreCut) {
  const auto back = decode(encode(Missing{1, std::string(100'000, 'x')}));
  ASSERT_TRUE(back);
  EXPECT_EQ(std::get<Missing>(*back).text.size(), kMostTextBytes);
}

TEST(Messages, SpecificationsAreChecked) {
  const TensorSpec good{0, "w", 0, 12, "(3, 4)"};
  EXPECT_NO_THROW(check_spec(good));
  for (auto change : {+[](TensorSpec& s) { s.name = ""; }, +[](TensorSpec& s) { s.name.assign(5000, 'n'); },
                      +[](TensorSpec& s) { s.shape.assign(5000, '1'); }, +[](TensorSpec& s) { s.dtype = 9; },
                      +[](TensorSpec& s) { s.count = ~0ULL; }}) {
    TensorSpec bad = good;
    change(bad);
    EXPECT_THROW(check_spec(bad), Error);
  }
}

// What one message makes the scheduler do has a limit, and so has the smallest partition that the job agrees on.
TEST(Messages, WorkAndWishesAreBounded) {
  Declare declare{1, {}};
  for (std::size_t i = 0; i < kMostDeclared; ++i) {
    declare.tensors.push_back({0, "model.decoder.layers." + std::to_string(i) + ".mlp.weight", 0, 1, "(4096, 4096)"});
  }
  const Bytes bytes = encode(declare);
  EXPECT_LT(bytes.size(), kMostMessageBytes);
  EXPECT_EQ(std::get<Declare>(*decode(bytes)), declare);
  declare.tensors.push_back({0, "one more", 0, 1, "(1,)"});
  EXPECT_FALSE(decode(encode(declare)).has_value());
  EXPECT_TRUE(decode(encode(Barrier{.call = 1, .partition_bytes = Barrier::kLeastPartition})).has_value());
  EXPECT_FALSE(decode(encode(Barrier{.call = 1, .partition_bytes = 1})).has_value());
}

}  // namespace
}  // namespace bps::van
