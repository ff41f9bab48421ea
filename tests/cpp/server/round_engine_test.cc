// SPDX-License-Identifier: Apache-2.0
#include "server/round_engine_fixture.h"

namespace bps::server {
namespace {

TEST_F(RoundEngineTest, TheResultStaysUntilItHasBeenSent) {
  use_slots(1);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush | kPull));
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    ASSERT_EQ(data(i).writes.size(), 1U);
    EXPECT_EQ(data(i).writes[0].immediate, 100 + i);
    EXPECT_EQ(sum_in_slot(data(i).writes[0]), 6);
  }
  collect_credits(0);
  EXPECT_TRUE(slots[0].empty()) << "its slot holds the result";
  engine.on_written(data(0).writes[0].token);
  engine.on_written(data(1).writes[0].token);
  EXPECT_EQ(engine.open_rounds(), 1U);
  engine.on_written(data(2).writes[0].token);
  EXPECT_EQ(engine.open_rounds(), 0U);
  collect_credits(0);
  EXPECT_EQ(slots[0].size(), 1U);
}

TEST_F(RoundEngineTest, AnAnswerWaitsForTheSendWindowAndKeepsItsOrder) {
  use_slots(2);
  data(0).room = 0;
  for (std::uint32_t round = 0; round < 2; ++round) {
    for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush | kPull, round));
  }
  EXPECT_TRUE(due.answers);
  EXPECT_FALSE(sessions[0]->flush());
  data(0).room = 1;
  EXPECT_TRUE(sessions[0]->flush());
  EXPECT_TRUE(sessions[0]->has_answers());
  data(0).room = 1;
  EXPECT_TRUE(sessions[0]->flush());
  EXPECT_FALSE(sessions[0]->has_answers());
  EXPECT_EQ(data(0).immediates(), (std::vector<std::uint32_t>{100, 200}));
}

TEST_F(RoundEngineTest, ASlotCountsOncePerGrant) {
  use_slots(2);
  const std::uint32_t slot = land(0, header(0, kPush | kPull));
  sessions[0]->on_write(data(0), slot);
  sessions[1]->on_write(data(1), slot);
  sessions[1]->on_write(data(1), 1'000'000);
  EXPECT_EQ(counters.stale.get(), 3U);
  EXPECT_EQ(counters.pushes.get(), 1U);
  land(1, header(1, kPush | kPull));
  land(2, header(2, kPush | kPull));
  EXPECT_EQ(sum_in_slot(data(0).writes.at(0)), 6);
}

TEST_F(RoundEngineTest, MemoryForAPushOnItsOwnIsMadeBetweenPushes) {
  share_memory();
  post(0, header(0, kPush));
  EXPECT_EQ(pool.bytes(), 0U) << "the data path does not grow the pool";
  EXPECT_TRUE(data(0).writes.empty());
  EXPECT_TRUE(engine.resume());
  EXPECT_GT(pool.bytes(), 0U);
  EXPECT_EQ(data(0).immediates(), std::vector<std::uint32_t>{100});
  memory[0].assign(memory[0].size(), -1);  // the worker's again
  EXPECT_FALSE(engine.resume());
  post(1, header(1, kPush | kPull));
  post(2, header(2, kPush | kPull));
  EXPECT_EQ(memory[1][0], 6);
  post(0, header(0, kPull));
  EXPECT_EQ(memory[0].back(), 6);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineTest, ARoundThatCompletesBeforeThereIsMemoryForItGoesOnInTheNextStep) {
  share_memory();
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, header(i, kPush));
  post(1, header(1, kPull));  // before its push was acknowledged
  EXPECT_TRUE(data(1).writes.empty());
  EXPECT_TRUE(engine.resume());
  EXPECT_EQ(data(0).immediates(), std::vector<std::uint32_t>{100});
  EXPECT_EQ(data(1).immediates(), (std::vector<std::uint32_t>{101, 151}));
  EXPECT_EQ(memory[1][0], 6);
  post(0, header(0, kPull));
  post(2, header(2, kPull));
  EXPECT_EQ(memory[0][0] + memory[2][0], 12);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineTest, WithoutMemoryARoundFailsForEveryMemberAndTheNextOneWorks) {
  share_memory();
  transport.out_of_memory = true;
  post(0, header(0, kPush));
  EXPECT_TRUE(engine.resume());
  post(1, header(1, kPush));
  post(2, header(2, kPush | kPull));
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    ASSERT_EQ(failures(i).size(), 1U) << i;
    EXPECT_EQ(failures(i)[0].immediate, 100 + i);
    EXPECT_EQ(failures(i)[0].what, "no memory");
    EXPECT_TRUE(data(i).writes.empty());
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
  transport.out_of_memory = false;
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, header(i, kPush, 1));
  EXPECT_TRUE(engine.resume());
  post(1, header(1, kPull, 1));
  EXPECT_EQ(memory[1][0], 6);
}

TEST_F(RoundEngineTest, AMemberWhosePushWasAcknowledgedLearnsOfTheFailureWhenItPulls) {
  use_slots(2);
  land(0, header(0, kPush));
  EXPECT_EQ(data(0).immediates(), std::vector<std::uint32_t>{100});
  tensor::PushHeader other = header(1, kPush | kPull);
  other.dtype = Dtype::kInt32;
  land(1, other);
  land(2, header(2, kPush | kPull));
  EXPECT_TRUE(failures(0).empty());
  EXPECT_EQ(engine.open_rounds(), 1U);
  post(0, header(0, kPull));
  ASSERT_EQ(failures(0).size(), 1U);
  EXPECT_EQ(failures(0)[0].code, ErrorCode::kMismatch);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineTest, ADuplicateThatDisagreesHarmsNothing) {
  use_slots(2);
  land(0, header(0, kPush | kPull));
  tensor::PushHeader other = header(0, kPush | kPull);
  other.op = ReduceOp::kMax;
  land(0, other);
  EXPECT_EQ(failures(0).size(), 1U);
  land(1, header(1, kPush | kPull));
  land(2, header(2, kPush | kPull));
  EXPECT_EQ(sum_in_slot(data(1).writes.at(0)), 6);
}

TEST_F(RoundEngineTest, ARoundWithoutAnyPayloadFails) {
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, header(i, tensor::kIsPush | kPull));
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(failures(i).size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(RoundEngineTest, WhoIsWaitedForWithoutASlotGetsOneMoreInTheNextStep) {
  use_slots(0, 2);
  use_slots(1, 1);
  use_slots(2, 2);
  land(1, header(1, kPush | kPull, 5));
  land(0, header(0, kPush | kPull));
  EXPECT_FALSE(engine.resume()) << "rank 2 can push";
  land(2, header(2, kPush | kPull));
  EXPECT_EQ(counters.overflow_slots.get(), 0U);
  EXPECT_TRUE(engine.resume());
  EXPECT_FALSE(engine.resume());
  EXPECT_EQ(counters.overflow_slots.get(), 1U);
  collect_credits(1);
  ASSERT_EQ(slots[1].size(), 1U);
  land(1, header(1, kPush | kPull));
  EXPECT_EQ(sum_in_slot(data(1).writes.at(0)), 6);
}

TEST_F(RoundEngineTest, ALostMembersRoundIsDroppedWhenItsAnswersHaveBeenSent) {
  use_slots(1);
  data(1).room = 0;
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush | kPull));
  sessions[1]->lose("gone");
  sessions[1]->discard();
  engine.drop_lost();
  EXPECT_EQ(engine.open_rounds(), 1U) << "ranks 0 and 2 still read the result";
  engine.on_written(data(0).writes[0].token);
  EXPECT_EQ(engine.open_rounds(), 1U);
  engine.on_written(data(2).writes[0].token);
  EXPECT_EQ(engine.open_rounds(), 0U);
  collect_credits(0);
  EXPECT_EQ(slots[0].size(), 1U);
  land(0, header(0, kPush | kPull, 1));
  EXPECT_EQ(engine.open_rounds(), 0U) << "a group without one of its members opens nothing";
}

TEST_F(RoundEngineTest, AWorkerWhoseMemoryCannotBeReadIsLost) {
  share_memory();
  data(2).reachable = false;
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, header(i, kPush | kPull));
  EXPECT_TRUE(sessions[2]->is_lost());
  EXPECT_FALSE(sessions[0]->is_lost());
  engine.drop_lost();
  EXPECT_EQ(engine.open_rounds(), 0U);
  EXPECT_TRUE(data(0).writes.empty());
}

TEST_F(RoundEngineTest, NamesTheRanksThatAreMissing) {
  use_slots(1);
  land(1, header(1, kPush | kPull));
  EXPECT_EQ(engine.missing({.tensor = 11, .partition = 0, .round = 0}), (std::vector<std::uint32_t>{0, 2}));
  EXPECT_TRUE(engine.missing({.tensor = 12, .partition = 0, .round = 0}).empty());
}

}  // namespace
}  // namespace bps::server
