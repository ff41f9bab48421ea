// SPDX-License-Identifier: Apache-2.0
// A connection that ends in the middle of a write: memory changes in whole units, and the sink hears how many.
#include <sys/socket.h>

#include "transport/tcp/tcp_data.h"
#include "transport/two_sides.h"

namespace bps::transport::tcp {
namespace {

constexpr std::size_t kSize = 40'000;  // more than what passes through the scratch
constexpr std::byte kOld{0xee};
constexpr std::uint32_t kImmediate = 7;

// The receiving end, and a peer that sends what the test says.
struct Receiver {
  explicit Receiver(std::size_t unit) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    peer = Fd(ends[0]);
    regions[1] = memory;
    data = std::make_unique<TcpData>(Fd(ends[1]), Hello{}, loop, counters, regions);
    data->sink = &sink;
    sink.unit = unit;
    data->start();
    for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i % 101);
  }
  // The frame, and so many bytes of its payload.
  Bytes frame_with(std::size_t payload) const {
    const TcpFrame frame{TcpFrame::kMagic, kImmediate, 1, 0, kSize};
    const auto head = codec::bytes_of(frame);
    Bytes all(head.begin(), head.end());
    all.insert(all.end(), sent.begin(), sent.begin() + static_cast<std::ptrdiff_t>(payload));
    return all;
  }
  // Sends that in pieces of this size, each taken before the next one comes.
  void send(std::size_t payload, std::size_t piece) { send_bytes(frame_with(payload), piece); }
  void send_bytes(const Bytes& all, std::size_t piece) {
    for (std::size_t at = 0; at < all.size(); at += piece) {
      const std::size_t size = std::min(piece, all.size() - at);
      ASSERT_EQ(::send(peer.get(), all.data() + at, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
      while (loop.turn(Duration::zero()) > 0) {
      }
    }
  }
  void expect_landed(std::size_t bytes) const {
    EXPECT_TRUE(std::equal(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(bytes), sent.begin()));
    EXPECT_EQ(std::count(memory.begin() + static_cast<std::ptrdiff_t>(bytes), memory.end(), kOld),
              static_cast<std::ptrdiff_t>(kSize - bytes));
  }

  EventLoop loop;
  Counters counters;
  Bytes memory = Bytes(kSize, kOld);
  Bytes sent = Bytes(kSize);
  TcpTransport::Regions regions;
  testing::Recorder sink;
  Fd peer;
  std::unique_ptr<TcpData> data;
};

class CutOffTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(CutOffTest, OnlyWholeUnitsLand) {
  for (const std::size_t payload : {std::size_t{1}, std::size_t{3}, std::size_t{8}, std::size_t{16'389}, kSize - 1}) {
    for (const std::size_t piece : {std::size_t{7}, std::size_t{1001}, std::size_t{20'003}, 2 * kSize}) {
      Receiver one(GetParam());
      one.send(payload, piece);
      const std::size_t whole = payload / GetParam() * GetParam();
      one.expect_landed(whole);
      EXPECT_TRUE(one.sink.cut_off.empty());
      one.data->abandon();
      if (whole == 0) {
        EXPECT_TRUE(one.sink.cut_off.empty());
      } else {
        EXPECT_EQ(one.sink.cut_off, (std::map<std::uint32_t, std::uint64_t>{{kImmediate, whole}}));
      }
      one.expect_landed(whole);
      EXPECT_TRUE(one.sink.writes.empty());
    }
  }
}

// Its bytes still come, and what follows is understood.
TEST_P(CutOffTest, AWriteThatIsStoppedLandsNoFurther) {
  Receiver one(GetParam());
  one.send(16'389, 1001);
  const std::size_t whole = 16'389 / GetParam() * GetParam();
  EXPECT_EQ(one.data->stop_landing(kImmediate + 1), 0U);
  EXPECT_EQ(one.data->stop_landing(kImmediate), whole);
  EXPECT_EQ(one.data->stop_landing(kImmediate), 0U);
  one.send_bytes(Bytes(kSize - 16'389, std::byte{1}), kSize);
  one.expect_landed(whole);
  EXPECT_TRUE(one.sink.writes.empty());
  one.send(kSize, kSize);
  one.expect_landed(kSize);
  EXPECT_EQ(one.sink.writes[kImmediate], 1U);
  one.data->abandon();
  EXPECT_TRUE(one.sink.cut_off.empty());
}

TEST_P(CutOffTest, AWriteThatHasLandedIsToldAsThat) {
  for (const std::size_t piece : {std::size_t{7}, std::size_t{1001}, std::size_t{20'003}, 2 * kSize}) {
    Receiver one(GetParam());
    one.send(kSize, piece);
    one.expect_landed(kSize);
    EXPECT_EQ(one.sink.writes[kImmediate], 1U);
    one.data->abandon();
    EXPECT_TRUE(one.sink.cut_off.empty());
  }
}

// Another connection to the peer has shown its end first.
TEST_P(CutOffTest, WhatThePeerHasSentBeforeItsEndIsTaken) {
  for (const bool is_whole : {true, false}) {
    Receiver one(GetParam());
    const Bytes all = one.frame_with(is_whole ? kSize : kSize / 2);
    ASSERT_EQ(::send(one.peer.get(), all.data(), all.size(), MSG_NOSIGNAL), static_cast<ssize_t>(all.size()));
    one.peer.reset();
    one.data->take_rest();
    one.expect_landed(is_whole ? kSize : kSize / 2);
    EXPECT_EQ(one.sink.write_count(), is_whole ? 1U : 0U);
    one.data->abandon();
  }
}

INSTANTIATE_TEST_SUITE_P(Units, CutOffTest, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace bps::transport::tcp
