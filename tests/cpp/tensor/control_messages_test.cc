// SPDX-License-Identifier: Apache-2.0
#include "tensor/control_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "transport/control_endpoint.h"

namespace bps::tensor {
namespace {

constexpr std::uint32_t kEpoch = 3;

std::vector<ControlMessage> samples() {
  Credits credits;
  for (std::uint32_t i = 0; i < 40; ++i) credits.slots.push_back({SlotNumber(i), i * 7ULL, i * 4096ULL, 8192});
  Credits of_rails{{{SlotNumber(1), 2, 3, 4}, {SlotNumber(5), 6, 7, 8}}, {9, 10, 11, 12}};
  return {Attach{1 << 22, true},
          Attach{1 << 22, false, 2, true},
          credits,
          of_rails,
          Credits{},
          PushFailed{17, ErrorCode::kPeerLost, "what", "hint"},
          Cancel{1, 2, 3, ErrorCode::kTimeout, "rank 0 gave up", "hint", {{7, 8}, {9, 10, 3}}, true},
          Cancelled{{1, 2}, {3}, {0, 5, 1000000}, {8}},
          Ping{5},
          Echo{5},
          RoundFailed{1, 2, 3, 4, ErrorCode::kPeerLost, "what", "hint"},
          Received{3, {7, 0xffffffff}},
          PathLost{3, {1, 2}},
          PathLost{65535, {}},
          PathBroken{3},
          AnswerKeys{3, 4, {{1, 2}, {3, 4}}},
          AnswerKeys{1, 2, {}},
          Landed{{1, 0xffffffff}},
          Committed{{2}},
          Committed{},
          RedoLogAt{1, 2, 3},
          HostHasLeft{1, 2, 3, 4, ErrorCode::kPeerLost, "what", "hint"}};
}

TEST(ControlMessages, RoundTrip) {
  for (const ControlMessage& message : samples()) {
    const Bytes bytes = encode(message, kEpoch);
    const auto decoded = decode(bytes, kEpoch);
    ASSERT_TRUE(decoded.has_value());
    EXPECT_EQ(*decoded, message);
    EXPECT_EQ(encode(*decoded, kEpoch), bytes);
  }
}

TEST(ControlMessages, TruncatedOrLongerIsRefused) {
  for (const ControlMessage& message : samples()) {
    Bytes bytes = encode(message, kEpoch);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(decode(std::span(bytes).first(size), kEpoch).has_value()) << message.index() << " " << size;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode(bytes, kEpoch).has_value());
  }
}

TEST(ControlMessages, AnnouncedCountsAreNotBelieved) {
  Bytes bytes = encode(Credits{}, kEpoch);
  ASSERT_TRUE(decode(bytes, kEpoch).has_value());
  std::fill(bytes.end() - 4, bytes.end(), std::byte{0xff});
  EXPECT_FALSE(decode(bytes, kEpoch).has_value());
}

TEST(ControlMessages, KeysOfRailsAreThoseOfEachSlot) {
  const auto is_accepted = [](const Credits& credits) { return decode(encode(credits, kEpoch), kEpoch).has_value(); };
  const SlotCredit slot{SlotNumber(1), 2, 3, 4};
  EXPECT_TRUE(is_accepted({{slot, slot}, {1, 2}}));
  EXPECT_FALSE(is_accepted({{slot, slot}, {1, 2, 3}}));
  EXPECT_FALSE(is_accepted({{}, {1}}));
  EXPECT_TRUE(is_accepted({{slot}, std::vector<std::uint64_t>(transport::kMostRails - 1)}));
  EXPECT_FALSE(is_accepted({{slot}, std::vector<std::uint64_t>(transport::kMostRails)}));
  EXPECT_FALSE(is_accepted({{{SlotNumber(SlotNumber::kEnd), 2, 3, 4}}, {1}})) << "workers keep tables by it";
  EXPECT_FALSE(is_accepted({{{SlotNumber(SlotNumber::kEnd), 2, 3, 4}}, {}})) << "with one rail as well";
}

TEST(ControlMessages, TypesKeepTheirNumbers) {
  const auto type_of = [](const ControlMessage& message) { return encode(message, kEpoch)[sizeof kEpoch]; };
  EXPECT_EQ(type_of(Attach{}), std::byte{0});
  EXPECT_EQ(type_of(Credits{}), std::byte{1});
  EXPECT_EQ(type_of(PushFailed{}), std::byte{2});
  EXPECT_EQ(type_of(Cancel{}), std::byte{3});
  EXPECT_EQ(type_of(Cancelled{}), std::byte{4});
  EXPECT_EQ(type_of(Ping{}), std::byte{5});
  EXPECT_EQ(type_of(Echo{}), std::byte{6});
  EXPECT_EQ(type_of(RoundFailed{}), std::byte{7});
  EXPECT_EQ(type_of(Received{}), std::byte{8});
  EXPECT_EQ(type_of(PathLost{}), std::byte{9});
  EXPECT_EQ(type_of(PathBroken{}), std::byte{10});
  EXPECT_EQ(type_of(AnswerKeys{}), std::byte{11});
  EXPECT_EQ(type_of(Landed{}), std::byte{12});
  EXPECT_EQ(type_of(Committed{}), std::byte{13});
  EXPECT_EQ(type_of(RedoLogAt{}), std::byte{14});
  EXPECT_EQ(type_of(HostHasLeft{}), std::byte{15});
}

TEST(ControlMessages, APathHasABoundedNumberOfStreams) {
  const std::vector<std::uint32_t> most(kMostStreams);
  const std::vector<std::uint32_t> more(kMostStreams + 1);
  EXPECT_TRUE(decode(encode(Received{1, most}, kEpoch), kEpoch));
  EXPECT_FALSE(decode(encode(Received{1, more}, kEpoch), kEpoch));
  EXPECT_TRUE(decode(encode(PathLost{1, most}, kEpoch), kEpoch));
  EXPECT_FALSE(decode(encode(PathLost{1, more}, kEpoch), kEpoch));
}

TEST(ControlMessages, KeysOfAnotherPathFitIntoOneMessage) {
  AnswerKeys keys{1, 2, std::vector<AnswerKeys::Key>(kMostKeys)};
  EXPECT_TRUE(decode(encode(keys, kEpoch), kEpoch));
  EXPECT_LT(encode(keys, kEpoch).size() + 16, transport::kMaxMessage);
  keys.keys.emplace_back();
  EXPECT_FALSE(decode(encode(keys, kEpoch), kEpoch));
}

TEST(ControlMessages, AnotherEpochsAreRefused) {
  for (const ControlMessage& message : samples()) {
    EXPECT_TRUE(decode(encode(message, kEpoch), kEpoch).has_value());
    EXPECT_FALSE(decode(encode(message, kEpoch), kEpoch + 1).has_value());
  }
}

TEST(ControlMessages, TheLongestFitIntoOne) {
  const std::string text(kMostTextBytes + 1, 'x');
  Cancel cancel{1, 2, 3, ErrorCode::kTimeout, text, text, std::vector<CancelledPartition>(kMostCancelled)};
  EXPECT_LE(encode(cancel, kEpoch).size(), transport::kMaxMessage);
  EXPECT_TRUE(decode(encode(cancel, kEpoch), kEpoch).has_value());
  cancel.partitions.emplace_back();
  EXPECT_FALSE(decode(encode(cancel, kEpoch), kEpoch).has_value());
}

TEST(ControlMessages, ValuesWithoutMeaningAreRefused) {
  EXPECT_FALSE(decode(encode(PushFailed{1, ErrorCode{200}, "", ""}, kEpoch), kEpoch)) << "unknown error code";
  EXPECT_FALSE(decode(encode(Attach{1, true, 0}, kEpoch), kEpoch)) << "no data endpoint";
}

TEST(ControlMessages, RandomBytesNeverCrash) {
  std::mt19937 random(1);
  const auto messages = samples();
  std::size_t understood = 0;
  for (int i = 0; i < 200000; ++i) {
    Bytes bytes = encode(messages[random() % messages.size()], kEpoch);
    const std::size_t changes = random() % 4;
    for (std::size_t c = 0; c < changes; ++c) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (random() % 3 == 0) bytes.resize(random() % (bytes.size() + 8));
    if (const auto message = decode(bytes, kEpoch)) {
      ++understood;
      ASSERT_EQ(encode(*message, kEpoch), bytes);
    }
  }
  EXPECT_GT(understood, 0U);
}

}  // namespace
}  // namespace bps::tensor
