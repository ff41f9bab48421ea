// SPDX-License-Identifier: Apache-2.0
#include "worker/flight_recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "eventually.h"
#include "worker/tensor.h"

namespace bps::worker {
namespace {

using std::chrono::microseconds;

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
    auto* entry = recorder_.begin(i, tensor_, kKind, static_cast<std::uint32_t>(2 * i), Clock::now());
    ASSERT_NE(entry, nullptr);
    if (i % 3 == 0) FlightRecorder::end(*entry, i, FlightRecorder::End::kDone, microseconds(i));
    if (i % 3 == 1) FlightRecorder::end(*entry, i, FlightRecorder::End::kFailed, std::chrono::hours(1000));
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
  EXPECT_EQ(found[0].duration_us, (1LL << 40) - 1) << "as much as fits";
  EXPECT_EQ(found[1].end, FlightRecorder::End::kNone);
  EXPECT_EQ(found[1].duration_us, -1);
  EXPECT_EQ(found[2].end, FlightRecorder::End::kDone);
  EXPECT_EQ(found[2].duration_us, 999);
  EXPECT_EQ(recorder_.list(10'000).size(), 256U);
}

TEST_F(FlightRecorderTest, OneThatWasOverwrittenCannotEnd) {
  auto* old = recorder_.begin(0, tensor_, kKind, 7, Clock::now());
  recorder_.begin(256, tensor_, kKind, 8, Clock::now());
  FlightRecorder::end(*old, 0, FlightRecorder::End::kFailed, microseconds(1));
  const auto found = recorder_.list(1);
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].sequence, 256U);
  EXPECT_EQ(found[0].end, FlightRecorder::End::kNone);
}

// What a list shows belongs together, although entries are overwritten meanwhile: all of them, or one again and again,
// as by a thread that was stopped for many operations.
TEST_F(FlightRecorderTest, MayBeReadWhileThreadsWrite) {
  for (const std::uint64_t step : {1U, 256U}) {
    FlightRecorder recorder;
    std::atomic<std::uint64_t> next{0};
    std::atomic<bool> over{false};
    std::vector<std::thread> writers;
    for (int i = 0; i < 3; ++i) {
      writers.emplace_back([&] {
        while (!over) {
          const std::uint64_t mine = next.fetch_add(step);
          auto* entry = recorder.begin(mine, tensor_, kKind, static_cast<std::uint32_t>(mine), Clock::now());
          const microseconds took(mine % 1000);
          if (entry != nullptr && mine / step % 2 == 0) {
            FlightRecorder::end(*entry, mine, FlightRecorder::End::kDone, took);
          }
        }
      });
    }
    std::size_t wrong = 0, seen = 0;
    const auto enough_is_seen = [&] {
      for (const auto& record : recorder.list(256)) {
        ++seen;
        if (record.round != static_cast<std::uint32_t>(record.sequence) || record.tensor != &tensor_) ++wrong;
        if (record.sequence / step % 2 == 1 && record.end != FlightRecorder::End::kNone) ++wrong;
        const auto took = static_cast<std::int64_t>(record.sequence % 1000);
        if (record.end == FlightRecorder::End::kDone && record.duration_us != took) ++wrong;
      }
      return seen >= 20'000;
    };
    EXPECT_TRUE(eventually(enough_is_seen, 100, kAtOnce));
    over = true;
    for (std::thread& writer : writers) writer.join();
    EXPECT_EQ(wrong, 0U) << "in steps of " << step;
  }
}

}  // namespace
}  // namespace bps::worker
