// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/capacity.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "transport/rdma/wire.h"

namespace bps::transport::rdma {
namespace {

// Whatever the order in which queue pairs come and go: what is reserved fits the queue, the queue fits the device, and
// the queue never shrinks under what is in it.
TEST(Capacity, AQueueIsNeverPromisedMoreThanItHolds) {
  std::mt19937 engine(11);
  const auto random = [&] { return static_cast<std::uint32_t>(engine()); };
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t limit = 1000 + random() % 40000;
    const std::uint32_t base = random() % 1000;
    QueueBudget budget(base, random() % 3000, limit);
    std::vector<std::uint32_t> taken;
    std::uint64_t sum = base;
    for (int step = 0; step < 300; ++step) {
      if (random() % 3 != 0 || taken.empty()) {
        const std::uint32_t wanted = 1 + random() % 300;
        const std::uint32_t before = budget.size();
        const auto size = budget.reserve(wanted);
        ASSERT_EQ(size.has_value(), sum + wanted <= limit);
        if (!size) continue;
        taken.push_back(wanted);
        sum += wanted;
        ASSERT_GE(*size, sum);
        ASSERT_GE(*size, before);
      } else {
        sum -= taken.back();
        budget.release(taken.back());
        taken.pop_back();
      }
      ASSERT_EQ(budget.reserved(), sum);
      ASSERT_LE(budget.size(), limit);
    }
  }
}

TEST(Capacity, SixtyFourPeersFitTheSmallestDevice) {
  QueueBudget sends(0, 2048, 32767);  // rxe
  for (int peer = 0; peer < 64; ++peer) {
    ASSERT_TRUE(sends.reserve(kControlSends));
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(sends.reserve(kDataWindow));
  }
}

TEST(Capacity, PiecesCoverAWrite) {
  EXPECT_EQ(pieces_of(0), 1U);
  EXPECT_EQ(pieces_of(kLongestPiece), 1U);
  EXPECT_EQ(pieces_of(kLongestPiece + 1), 2U);
  EXPECT_LE(pieces_of(kLargestWrite), kDataWindow);
}

TEST(Capacity, IdentifiersKeepWhatTheyAreGiven) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t number = random() >> 8;
    for (const auto kind : {WrId::Kind::kSend, WrId::Kind::kControlReceive, WrId::Kind::kEmptyReceive}) {
      const WrId id(WrId(kind, number).value());
      EXPECT_EQ(id.kind(), kind);
      EXPECT_EQ(id.number(), number);
    }
    const auto immediate = static_cast<std::uint32_t>(random());
    EXPECT_EQ(from_wire(to_wire(immediate)), immediate);
  }
}

}  // namespace
}  // namespace bps::transport::rdma
