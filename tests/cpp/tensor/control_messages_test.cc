// SPDX-License-Identifier: Apache-2.0
#include "tensor/control_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace bps::tensor {
namespace {

std::vector<ControlMessage> samples() {
  Credits credits;
  for (std::uint32_t i = 0; i < 40; ++i) credits.slots.push_back({i, i * 7ULL, i * 4096ULL, 8192});
  return {Attach{1 << 22, true},
          credits,
          Credits{},
          PushFailed{17, ErrorCode::kPeerLost, "what", "hint"},
          WhoIsMissing{1, 2, 3, 4},
          Missing{9, {0, 5, 1000000}}};
}

TEST(ControlMessages, RoundTrip) {
  for (const ControlMessage& message : samples()) {
    const Bytes bytes = encode(message);
    const auto decoded = decode(bytes);
    ASSERT_TRUE(decoded.has_value());
    EXPECT_EQ(*decoded, message);
    EXPECT_EQ(encode(*decoded), bytes);
  }
}

TEST(ControlMessages, TruncatedOrLongerIsRefused) {
  for (const ControlMessage& message : samples()) {
    Bytes bytes = encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(decode(std::span(bytes).first(size)).has_value()) << message.index() << " " << size;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode(bytes).has_value());
  }
}

TEST(ControlMessages, AnnouncedCountsAreNotBelieved) {
  Bytes bytes = encode(Credits{});
  ASSERT_TRUE(decode(bytes).has_value());
  std::fill(bytes.end() - 4, bytes.end(), std::byte{0xff});
  EXPECT_FALSE(decode(bytes).has_value());
}

TEST(ControlMessages, TypesKeepTheirNumbers) {
  EXPECT_EQ(encode(Attach{})[0], std::byte{0});
  EXPECT_EQ(encode(Credits{})[0], std::byte{1});
  EXPECT_EQ(encode(PushFailed{})[0], std::byte{2});
  EXPECT_EQ(encode(WhoIsMissing{})[0], std::byte{3});
  EXPECT_EQ(encode(Missing{})[0], std::byte{4});
}

TEST(ControlMessages, ValuesWithoutMeaningAreRefused) {
  EXPECT_FALSE(decode(encode(PushFailed{1, ErrorCode{200}, "", ""}))) << "unknown error code";
  EXPECT_FALSE(decode(encode(Attach{1, true, 0}))) << "no data endpoint";
}

TEST(ControlMessages, RandomBytesNeverCrash) {
  std::mt19937 random(1);
  const auto messages = samples();
  std::size_t understood = 0;
  for (int i = 0; i < 200000; ++i) {
    Bytes bytes = encode(messages[random() % messages.size()]);
    const std::size_t changes = random() % 4;
    for (std::size_t c = 0; c < changes; ++c) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (random() % 3 == 0) bytes.resize(random() % (bytes.size() + 8));
    if (const auto message = decode(bytes)) {
      ++understood;
      ASSERT_EQ(encode(*message), bytes);
    }
  }
  EXPECT_GT(understood, 0U);
}

}  // namespace
}  // namespace bps::tensor
