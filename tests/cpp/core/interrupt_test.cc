// SPDX-License-Identifier: Apache-2.0
#include "core/interrupt.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <limits>
#include <thread>

#include "core/fd.h"

namespace bps {
namespace {

struct Stopped {};
constexpr double kLong_s = 60;
constexpr auto kSoon = std::chrono::seconds(5);

// Whether `wait` ends by the check, which fires at its third look.
bool ends(const std::function<void()>& wait) {
  int looks = 0;
  const auto start = Clock::now();
  try {
    const InterruptScope scope([&] {
      if (++looks == 3) throw Stopped();
    });
    wait();
  } catch (const Stopped&) {
    return Clock::now() - start < kSoon;
  }
  return false;
}

TEST(Interrupt, EndsEveryKindOfWait) {
  const Fd silent(::eventfd(0, EFD_CLOEXEC));
  EXPECT_TRUE(ends([] { sleep_until(Deadline::after(kLong_s)); }));
  EXPECT_TRUE(ends([&] {
    pollfd descriptor{silent.get(), POLLIN, 0};
    poll_until(descriptor, Deadline::never());
  }));
  std::mutex mutex;
  std::condition_variable changed;
  EXPECT_TRUE(ends([&] {
    std::unique_lock lock(mutex);
    wait_until(lock, changed, Deadline::never(), [] { return false; });
  }));
  EXPECT_TRUE(mutex.try_lock()) << "the lock is released";
  mutex.unlock();
}

TEST(Interrupt, ChecksRunWithoutTheLockAndAreChained) {
  std::mutex mutex;
  std::condition_variable changed;
  int outer_looks = 0;
  const InterruptScope outer([&] { ++outer_looks; });
  bool done = false;
  const InterruptScope inner([&] {
    const std::lock_guard lock(mutex);
    done = true;
  });
  std::unique_lock lock(mutex);
  EXPECT_TRUE(wait_until(lock, changed, Deadline::after(kLong_s), [&] { return done; }));
  EXPECT_EQ(outer_looks, 1);
}

TEST(Interrupt, WithoutACheckWaitsEndAtTheDeadline) {
  const auto start = Clock::now();
  sleep_until(Deadline::after(0.02));
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(20));
  EXPECT_EQ(end_of_slice(Deadline::never()), Clock::time_point::max());
  std::thread([] { EXPECT_EQ(end_of_slice(Deadline::never()), Clock::time_point::max()); }).join();
}

TEST(Clock, LongAndOddTimes) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double seconds : {kInfinity, 1e10, 1e300, 2e9}) {
    EXPECT_FALSE(Deadline::after(seconds).passed()) << seconds;
    EXPECT_EQ(Deadline::after(seconds).at(), Deadline::never().at()) << seconds;
    EXPECT_EQ(Deadline::after(seconds).left_ms(), 1'000'000'000) << seconds;
  }
  EXPECT_FALSE(Deadline::after(9e8).passed());
  for (const double seconds : {0.0, -1.0, -1e10, -kInfinity}) EXPECT_TRUE(Deadline::after(seconds).passed()) << seconds;
}

}  // namespace
}  // namespace bps
