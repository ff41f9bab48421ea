// SPDX-License-Identifier: Apache-2.0
#include "core/histogram.h"

#include <gtest/gtest.h>

#include <chrono>

namespace bps {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

// The bucket that a time falls into.
std::size_t bucket_of(Duration time) {
  DurationHistogram histogram;
  histogram.observe(time);
  std::size_t found = DurationHistogram::kBounds + 1;
  for (std::size_t i = 0; i <= DurationHistogram::kBounds; ++i) {
    if (histogram.count(i) == 1) found = i;
  }
  return found;
}

TEST(DurationHistogram, ABoundBelongsToTheBucketBelowIt) {
  for (std::size_t i = 0; i < DurationHistogram::kBounds; ++i) {
    const Duration bound = to_duration(DurationHistogram::bound_s(i));
    EXPECT_EQ(bucket_of(bound), i);
    EXPECT_EQ(bucket_of(bound + nanoseconds(1)), i + 1);
  }
}

TEST(DurationHistogram, TakesAnyTime) {
  EXPECT_EQ(bucket_of(Duration(0)), 0U);
  EXPECT_EQ(bucket_of(Duration(-1)), 0U);
  EXPECT_EQ(bucket_of(Duration::max()), DurationHistogram::kBounds);
}

TEST(DurationHistogram, SumsWhatItHasSeen) {
  DurationHistogram histogram;
  histogram.observe(microseconds(40));
  histogram.observe(microseconds(60));
  EXPECT_EQ(histogram.sum_ns(), 100'000U);
  EXPECT_EQ(histogram.count(1), 2U);
}

}  // namespace
}  // namespace bps
