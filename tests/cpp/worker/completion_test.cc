// SPDX-License-Identifier: Apache-2.0
#include "worker/completion.h"

#include <gtest/gtest.h>

#include <thread>

namespace bps::worker {
namespace {

TEST(Completion, IsCompleteWhenAllAnswersCame) {
  Completion one;
  EXPECT_FALSE(one.is_done());
  one.end();
  EXPECT_TRUE(one.is_done());
  EXPECT_TRUE(one.is_over());
  EXPECT_FALSE(one.has_failed());
  EXPECT_TRUE(one.is_reusable());
  one.restart();
  EXPECT_FALSE(one.is_done());
  EXPECT_FALSE(one.is_over());
}

TEST(Completion, FailsWhenAPartitionEndedWithoutItsAnswer) {
  Completion one;
  EXPECT_TRUE(one.begin_failing());
  EXPECT_FALSE(one.begin_failing()) << "only once";
  EXPECT_TRUE(one.is_failing());
  one.mark_incomplete();
  one.end();
  EXPECT_TRUE(one.has_failed());
  EXPECT_FALSE(one.is_failing());
}

TEST(Completion, IsCompleteAlthoughItWasFailingWhenAllAnswersCame) {
  Completion one;
  EXPECT_TRUE(one.begin_failing());
  one.end();
  EXPECT_TRUE(one.is_done());
  EXPECT_FALSE(one.has_failed());
  EXPECT_FALSE(one.is_reusable()) << "a loop may still be about to cancel it";
}

TEST(Completion, NothingFailsThatIsDone) {
  Completion one;
  one.end();
  EXPECT_FALSE(one.begin_failing());
  EXPECT_FALSE(one.has_failed());
}

TEST(Completion, MemoryThatWasGivenBackOutweighsAMissingAnswer) {
  Completion one;
  one.mark_given_back();
  one.mark_incomplete();
  EXPECT_TRUE(one.is_given_back());
  EXPECT_TRUE(one.is_incomplete());
}

TEST(Completion, ACallerThatSleepsWhileItBeginsToFailIsWokenAtTheEnd) {
  Completion one;
  std::thread caller([&] { EXPECT_TRUE(one.wait(Deadline::after(60))); });
  EXPECT_TRUE(one.begin_failing());
  one.mark_incomplete();
  one.end();
  caller.join();
}

}  // namespace
}  // namespace bps::worker
