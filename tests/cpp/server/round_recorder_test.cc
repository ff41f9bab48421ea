// SPDX-License-Identifier: Apache-2.0
#include "server/round_recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "core/clock.h"

namespace bps::server {
namespace {

// All fields follow from the number, so that a mixture of two rounds is recognised.
Round round_of(std::uint32_t number) {
  Round round;
  round.key = {number + 1, number + 2, number + 3, number % 2 == 0};
  round.number = number;
  round.history.last_rank = number + 4;
  round.first.length = number + 5;
  round.history.opened = number + 6;
  round.history.summed_at = number + 7;
  if (number % 3 == 0) round.fail({ErrorCode::kTimeout, "", ""});
  return round;
}

void expect_is(const RoundRecorder::Record& record, std::uint32_t number) {
  EXPECT_EQ(record.key, (RoundKey{number + 1, number + 2, number + 3, number % 2 == 0}));
  EXPECT_EQ(record.number, number);
  EXPECT_EQ(record.last_rank, number + 4);
  EXPECT_EQ(record.bytes, number + 5);
  EXPECT_EQ(record.opened, number + 6);
  EXPECT_EQ(record.summed, number + 7);
  EXPECT_EQ(record.ended, number + 8);
  EXPECT_EQ(record.failed, number % 3 == 0);
}

TEST(RoundRecorderTest, KeepsTheNewest) {
  RoundRecorder recorder;
  EXPECT_TRUE(recorder.list().empty());
  for (std::uint32_t i = 0; i < 1000; ++i) recorder.note(round_of(i), i + 8);
  const auto found = recorder.list();
  ASSERT_EQ(found.size(), 128U);
  for (std::uint32_t i = 0; i < 128; ++i) expect_is(found[i], 872 + i);
}

TEST(RoundRecorderTest, IsReadWhileItIsWritten) {
  RoundRecorder recorder;
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over) {
      for (const auto& record : recorder.list()) expect_is(record, record.number);
    }
  });
  for (std::uint32_t i = 0; i < 200'000; ++i) recorder.note(round_of(i), i + 8);
  over = true;
  reader.join();
}

TEST(CoarseClockTest, IsTheSameClockSomeMillisecondsAgo) {
  const std::uint64_t coarse = coarse_now_ns();
  const std::uint64_t exact = now_ns();
  EXPECT_LE(coarse, exact);
  EXPECT_LT(exact - coarse, 1'000'000'000U);
}

}  // namespace
}  // namespace bps::server
