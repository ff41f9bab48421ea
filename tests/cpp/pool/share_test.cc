// SPDX-License-Identifier: Apache-2.0
#include "pool/share.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bps::pool {
namespace {

constexpr std::uint64_t kGiB = 1U << 30;
const Limits kLimits = Limits::from({.cores = 8, .memory = 8 * kGiB, .jobs = 4, .user_jobs = 2}, {});

std::string why_not(const Limits& limits, const Use& use, const Share& wanted) {
  try {
    (void)grant(limits, use, wanted, "alice");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PoolShare, AJobThatSaysNothingGetsAnEqualPart) {
  const Share share = grant(kLimits, {}, {}, "alice");
  EXPECT_EQ(share.cores, 2U);
  EXPECT_EQ(share.memory, 2 * kGiB);
}

TEST(PoolShare, APoolOfFewCoresGivesOneEach) {
  const Limits limits = Limits::from({.cores = 1, .memory = kGiB, .jobs = 4}, {});
  EXPECT_EQ(grant(limits, {}, {}, "alice").cores, 1U);
  EXPECT_EQ(why_not(limits, {{1, kGiB / 4}, 1, 0}, {}),
            "the pool is full: 1 of its 1 core are taken, and the job asks for 1");
}

TEST(PoolShare, WhatTheMachineHasIsTheDefault) {
  const Limits limits = Limits::from({.jobs = 4}, {.cores = 6, .memory = 4 * kGiB});
  EXPECT_EQ(limits.all.cores, 6U);
  EXPECT_EQ(limits.all.memory, 3 * kGiB);
  EXPECT_EQ(limits.user_jobs, 4U);
}

TEST(PoolShare, RefusalsHaveTheNumbers) {
  EXPECT_EQ(why_not(kLimits, {{6, kGiB}, 1, 0}, {3, kGiB}),
            "the pool is full: 6 of its 8 cores are taken, and the job asks for 3");
  EXPECT_EQ(why_not(kLimits, {{1, 7 * kGiB}, 1, 0}, {1, 2 * kGiB}),
            "the pool is full: 7168 of its 8192 MiB are taken, and the job asks for 2048 MiB");
  EXPECT_EQ(why_not(kLimits, {{4, kGiB}, 4, 0}, {}), "the pool is full: it serves 4 jobs, which is its limit");
  EXPECT_EQ(why_not(kLimits, {{2, kGiB}, 2, 2}, {}),
            "the pool is full: it serves 2 jobs of the user alice, which is the limit");
  EXPECT_EQ(why_not(kLimits, {}, {9, 0}), "a job may have 8 cores of this pool, and this one asks for 9");
  EXPECT_EQ(why_not(kLimits, {}, {1, 9 * kGiB}),
            "a job may have 8192 MiB of this pool, and this one asks for 9216 MiB");
  EXPECT_EQ(why_not(kLimits, {}, {1, 1}), "a server needs 64 MiB, and this job asks for 0 MiB");
}

TEST(PoolShare, AJobHasALimitOfItsOwn) {
  const Limits limits =
      Limits::from({.cores = 8, .memory = 8 * kGiB, .jobs = 2, .job_cores = 3, .job_memory = kGiB}, {});
  const Share share = grant(limits, {}, {}, "alice");
  EXPECT_EQ(share.cores, 3U);
  EXPECT_EQ(share.memory, kGiB);
  EXPECT_EQ(why_not(limits, {}, {4, 0}), "a job may have 3 cores of this pool, and this one asks for 4");
}

TEST(PoolShare, MoreThanThePoolHasIsTakenWhenItWasMadeSmaller) {
  EXPECT_EQ(why_not(kLimits, {{12, kGiB}, 1, 0}, {1, kGiB}),
            "the pool is full: 12 of its 8 cores are taken, and the job asks for 1");
}

TEST(PoolShare, APoolWithoutRoomForAServerDoesNotStart) {
  EXPECT_THROW(Limits::from({.memory = 1, .jobs = 1}, {}), Error);
}

}  // namespace
}  // namespace bps::pool
