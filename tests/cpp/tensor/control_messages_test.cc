#include "tensor/control_messages.h"

#include <gtest/gtest.h>

#include <random>

namespace bps::tensor {
namespace {

std::vector<ControlMessage> samples() {
  Credits credits;
  for (std::uint32_t i = 0; i < 40; ++i) credits.slots.push_back({i, i * 7ULL, i * 4096ULL, 8192});
  return {Attach{1 << 22, true},      credits, Credits{}, PushFailed{17, 3, "what", "hint"}, WhoIsMissing{1, 2, 3, 4},
          Missing{9, {0, 5, 1000000}}};
}

TEST(ControlMessages, RoundTrip) {
  for (const ControlMessage& message : samples()) {
    const Bytes bytes = encode(message);
    const auto decoded = decode_control_message(bytes);
    ASSERT_TRUE(decoded.has_value());
    EXPECT_EQ(decoded->index(), message.index());
    EXPECT_EQ(encode(*decoded), bytes);
  }
}

TEST(ControlMessages, TruncatedOrLongerIsRefused) {
  for (const ControlMessage& message : samples()) {
    Bytes bytes = encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_FALSE(decode_control_message(std::span(bytes).first(size)).has_value()) << message.index() << " " << size;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(decode_control_message(bytes).has_value());
  }
}

TEST(ControlMessages, AnnouncedCountsAreNotBelieved) {
  Writer out;
  out.put(std::uint8_t{2}).put(~std::uint32_t{0});
  EXPECT_FALSE(decode_control_message(out.take()).has_value());
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
    understood += decode_control_message(bytes).has_value();
  }
  EXPECT_GT(understood, 0U);
}

}  // namespace
}  // namespace bps::tensor
