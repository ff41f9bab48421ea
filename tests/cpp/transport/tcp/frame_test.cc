#include "transport/tcp/frame.h"

#include <gtest/gtest.h>

namespace bps::transport::tcp {
namespace {

TEST(TcpFrame, GoldenBytes) {
  const TcpFrame frame{TcpFrame::kMagic, 0x01020304, 5, 6, 7};
  constexpr std::uint8_t kGolden[32] = {'1', 'B', 'P', 'S', 4, 3, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0,
                                        6,   0,   0,   0,   0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_TRUE(std::ranges::equal(codec::bytes_of(frame), std::as_bytes(std::span(kGolden))));
  EXPECT_TRUE(std::ranges::equal(codec::encode(frame), std::as_bytes(std::span(kGolden))));
}

TEST(TcpFrame, AnotherMagicOrAnAbsurdLengthIsRefused) {
  TcpFrame frame{TcpFrame::kMagic, 0, 0, 0, TcpFrame::kMostBytes};
  EXPECT_TRUE(codec::accepts(frame));
  ++frame.length;
  EXPECT_FALSE(codec::accepts(frame));
  frame = {TcpFrame::kMagic + 1, 0, 0, 0, 0};
  EXPECT_FALSE(codec::accepts(frame));
}

}  // namespace
}  // namespace bps::transport::tcp
