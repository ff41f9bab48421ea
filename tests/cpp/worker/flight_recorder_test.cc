// SPDX-License-Identifier: Apache-2.0
#include "worker/flight_recorder.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "worker/tensor.h"

namespace bps::worker {
namespace {

constexpr auto kKind = tensor::OperationKind::kBroadcast;

class FlightRecorderTest : public ::testing::Test {
 protected:
  static Tensor tensor() {
    const tensor::CutRule rule;
    return {rule.cut(4, 4), rule.cut(4, 4, 1)};
  }
  const Tensor tensor_ = tensor();
  FlightRecorder recorder_;
};

TEST_F(FlightRecorderTest, KeepsTheNewestAndTellsWhatBecameOfThem) {
  EXPECT_TRUE(recorder_.list(10).empty());
  for (std::uint64_t i = 0; i < 1000; ++i) {
    auto& entry = recorder_.begin(i, tensor_, kKind, static_cast<std::uint32_t>(2 * i), Clock::now());
    if (i % 3 == 0) FlightRecorder::end(entry, i, FlightRecorder::End::kDone);
    if (i % 3 == 1) FlightRecorder::end(entry, i, FlightRecorder::End::kFailed);
  }
  const auto found = recorder_.list(3);
  ASSERT_EQ(found.size(), 3U);
  for (std::uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(found[i].sequence, 997 + i);
    EXPECT_EQ(found[i].round, 2 * (997 + i));
    EXPECT_EQ(found[i].tensor, &tensor_);
    EXPECT_EQ(found[i].kind, kKind);
  }
  EXPECT_EQ(found[0].end, FlightRecorder::End::kFailed);  // 997
  EXPECT_EQ(found[1].end, FlightRecorder::End::kNone);
  EXPECT_EQ(found[1].duration_us, -1);
  EXPECT_EQ(found[2].end, FlightRecorder::End::kDone);
  EXPECT_GE(found[2].duration_us, 0);
  EXPECT_EQ(recorder_.list(10'000).size(), 256U);
}

TEST_F(FlightRecorderTest, OneThatWasOverwrittenCannotEnd) {
  auto& old = recorder_.begin(0, tensor_, kKind, 7, Clock::now());
  recorder_.begin(256, tensor_, kKind, 8, Clock::now());
  FlightRecorder::end(old, 0, FlightRecorder::End::kFailed);
  const auto found = recorder_.list(1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].sequence, 256U);
  EXPECT_EQ(found[0].end, FlightRecorder::End::kNone);
}

// What a list shows belongs together, although entries are overwritten meanwhile.
TEST_F(FlightRecorderTest, MayBeReadWhileThreadsWrite) {
  std::atomic<std::uint64_t> sequence{0};
  std::atomic<bool> ends{false};
  std::vector<std::thread> writers;
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&] {
      while (!ends) {
        const std::uint64_t mine = sequence.fetch_add(1);
        auto& entry = recorder_.begin(mine, tensor_, kKind, static_cast<std::uint32_t>(mine), Clock::now());
        FlightRecorder::end(entry, mine, FlightRecorder::End::kDone);
      }
    });
  }
  std::size_t seen = 0;
  while (seen < 20'000) {
    for (const auto& record : recorder_.list(256)) {
      ++seen;
      ASSERT_EQ(record.round, static_cast<std::uint32_t>(record.sequence));
      ASSERT_EQ(record.tensor, &tensor_);
    }
  }
  ends = true;
  for (std::thread& writer : writers) writer.join();
}

}  // namespace
}  // namespace bps::worker
