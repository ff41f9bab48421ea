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
  EXPECT_FALSE(sessions[0]->answers().flush());
  data(0).room = 1;
  EXPECT_TRUE(sessions[0]->answers().flush());
  EXPECT_FALSE(sessions[0]->answers().is_empty());
  data(0).room = 1;
  EXPECT_TRUE(sessions[0]->answers().flush());
  EXPECT_TRUE(sessions[0]->answers().is_empty());
  EXPECT_EQ(data(0).immediates(), (std::vector<std::uint32_t>{100, 200}));
}

TEST_F(RoundEngineTest, AFullConnectionHoldsUpNoOther) {
  transport::Hello second{.node = 1};
  second.plane = transport::Plane::kData;
  second.stream = 1;
  sessions[0]->accept(std::make_unique<transport::IncomingConnection>(second));
  FakeData& full = data(0);
  FakeData& other = data(kWorkers);
  full.room = other.room = 0;
  const auto post_to = [&](FakeData& by, std::uint32_t immediate) {
    sessions[0]->post({.op = {.immediate = immediate}, .data = &by});
  };
  post_to(full, 1);
  post_to(other, 2);
  other.room = 1;
  EXPECT_TRUE(sessions[0]->answers().flush());
  EXPECT_EQ(other.immediates(), (std::vector<std::uint32_t>{2}));
  other.room = 1;
  post_to(other, 3);
  EXPECT_EQ(other.immediates(), (std::vector<std::uint32_t>{2, 3})) << "at once";
  full.room = 1;
  post_to(full, 4);
  EXPECT_TRUE(full.writes.empty()) << "in their order";
  EXPECT_TRUE(sessions[0]->answers().flush());
  full.room = 1;
  EXPECT_TRUE(sessions[0]->answers().flush());
  EXPECT_EQ(full.immediates(), (std::vector<std::uint32_t>{1, 4}));
  EXPECT_TRUE(sessions[0]->answers().is_empty());
}

TEST_F(RoundEngineTest, ASlotCountsOncePerGrant) {
  use_slots(2);
  const std::uint32_t slot = land(0, header(0, kPush | kPull));
  sessions[0]->on_write(data(0), slot, 64 + kBytes);
  sessions[1]->on_write(data(1), slot, 64 + kBytes);
  sessions[1]->on_write(data(1), 1'000'000, 64 + kBytes);
  EXPECT_EQ(counters.stale.get(), 3U);
  EXPECT_EQ(counters.pushes.get(), 1U);
  land(1, header(1, kPush | kPull));
  land(2, header(2, kPush | kPull));
  EXPECT_EQ(sum_in_slot(data(0).writes.at(0)), 6);
}

// Of the rest of the slot nobody knows whose it is.
TEST_F(RoundEngineTest, APushThatIsShorterThanItsHeaderSaysIsRefused) {
  use_slots(2);
  for (const std::uint64_t landed : {std::uint64_t{0}, std::uint64_t{64}, 64 + kBytes - 4, 64 + kBytes + 4}) {
    land(0, header(0, kPush | kPull), landed);
    ASSERT_EQ(failures(0).size(), 1U) << landed;
    EXPECT_NE(failures(0)[0].what.find("not as long as its header says"), std::string::npos);
    collect_credits(0);
  }
  land(0, header(0, tensor::kIsPush | kPull), 64 + kBytes);
  EXPECT_EQ(failures(0).size(), 1U) << "a payload that the header does not tell of";
  EXPECT_EQ(counters.pushes.get(), 0U);
  EXPECT_EQ(engine.open_rounds(), 0U);
  land(1, header(1, kPush | kPull), 1 << 20);
  EXPECT_TRUE(data(1).is_lost()) << "it has written over the slots of others";
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

TEST_F(RoundEngineTest, APullThatDisagreesWhenTheSumIsKnownIsRefusedAlone) {
  share_memory();
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, header(i, kPush));
  EXPECT_TRUE(engine.resume());
  post(0, header(0, kPull));
  EXPECT_EQ(memory[0][0], 6);
  tensor::PushHeader other = header(1, kPull);
  other.op = ReduceOp::kMax;
  post(1, other);
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kMismatch);
  post(2, header(2, kPull));
  EXPECT_TRUE(failures(2).empty()) << "a round ends for everybody or for nobody, and rank 0 has the sum";
  EXPECT_EQ(memory[2][0], 6);
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

TEST_F(RoundEngineTest, ADisagreementWhereAMemberIsGoneIsToldAndEndsTheRound) {
  tensor::PushHeader first = header(0, kPush);
  first.kind = tensor::OperationKind::kSplit;
  post(0, first);
  engine.gone().leave(0, "worker 0 has left the job");
  engine.fail_lost();
  EXPECT_EQ(engine.open_rounds(), 1U) << "what it has pushed counts";
  tensor::PushHeader other = header(1, kPush);
  other.kind = tensor::OperationKind::kSplit;
  other.op = ReduceOp::kMax;
  post(1, other);
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_NE(failures(1)[0].what.find("disagree"), std::string::npos);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// The scheduler has told a rank of the disagreement, and the rank has left: others may not have been told yet.
TEST_F(RoundEngineTest, WhereRanksDisagreeTheOneThatLeavesIsNotTheCause) {
  use_slots(1);
  land(1, header(1, kPush | kPull));
  engine.gone().disagree(header(0, kPush).tensor, "'w' is int8 on worker 0");
  engine.gone().leave(0, "worker 0 has left the job");
  engine.fail_lost();
  land(2, header(2, kPush | kPull));
  for (const std::uint32_t rank : {1, 2}) {
    ASSERT_EQ(failures(rank).size(), 1U);
    EXPECT_EQ(failures(rank)[0].code, ErrorCode::kMismatch);
    EXPECT_EQ(failures(rank)[0].what, "'w' is int8 on worker 0");
  }
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
  engine.fail_lost();
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
  engine.fail_lost();
  EXPECT_EQ(engine.open_rounds(), 0U);
  EXPECT_TRUE(data(0).writes.empty());
}

tensor::Cancel cancel_of(std::uint32_t immediate, std::uint32_t round = 0) {
  tensor::Cancel made;
  made.tensor = 11;
  made.round = round;
  made.code = ErrorCode::kTimeout;
  made.what = "a rank gave up";
  made.partitions.push_back({immediate, 0});
  return made;
}

TEST_F(RoundEngineTest, ACancelledRoundFailsForEverybody) {
  use_slots(2);
  land(0, header(0, kPush | kPull));
  land(1, header(1, kPush | kPull));
  const tensor::Cancelled reply = engine.cancel(*sessions[0], cancel_of(100));
  EXPECT_EQ(reply.aborted, (std::vector<std::uint32_t>{100}));
  EXPECT_TRUE(reply.answered.empty());
  EXPECT_EQ(reply.missing, (std::vector<std::uint32_t>{2}));
  ASSERT_EQ(failures(1).size(), 1U) << "who waits is told at once";
  EXPECT_EQ(failures(1)[0].what, "a rank gave up; it still waited for rank 2");
  EXPECT_EQ(engine.open_rounds(), 1U) << "rank 2 is still to be told";
  land(2, header(2, kPush | kPull));
  ASSERT_EQ(failures(2).size(), 1U);
  EXPECT_EQ(failures(2)[0].code, ErrorCode::kTimeout);
  EXPECT_EQ(engine.open_rounds(), 0U);
  EXPECT_TRUE(data(0).writes.empty());
  EXPECT_TRUE(data(2).writes.empty());
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush | kPull, 1));
  EXPECT_EQ(sum_in_slot(data(0).writes.at(0)), 6) << "the next round is a new one";
}

TEST_F(RoundEngineTest, AFailedRoundDoesNotWaitForOthersWhenAMemberHasLeft) {
  use_slots(2);
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(100)).aborted.size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 1U);
  engine.gone().leave(0, "worker 0 has left the job");
  engine.fail_lost();
  EXPECT_EQ(engine.open_rounds(), 0U);
  land(1, header(1, kPush | kPull));
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kPeerLost);
  EXPECT_EQ(failures(1)[0].what, "worker 0 has left the job");
  EXPECT_EQ(engine.cancel(*sessions[2], cancel_of(102)).answered.size(), 1U) << "as of every round that is over";
  land(2, header(2, kPush | kPull));
  ASSERT_EQ(failures(2).size(), 1U) << "so that nobody waits for an answer";
}

// It has pushed before, and so the round would have completed.
TEST_F(RoundEngineTest, ARoundThatFailsAfterAMemberHasLeftIsOverAtOnce) {
  use_slots(2);
  land(0, header(0, kPush));
  engine.gone().leave(0, "worker 0 has left the job");
  engine.fail_lost();
  EXPECT_EQ(engine.open_rounds(), 1U);
  EXPECT_EQ(engine.cancel(*sessions[1], cancel_of(101)).aborted.size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 0U);
  land(2, header(2, kPush | kPull));
  ASSERT_EQ(failures(2).size(), 1U);
  EXPECT_EQ(failures(2)[0].code, ErrorCode::kPeerLost);
}

// A push on its own whose bytes are here. What would still have to be read from a rank that is gone does not count.
TEST_F(RoundEngineTest, WhatARankContributedBeforeItLeftCountsWhenItsConnectionsHaveClosed) {
  use_slots(2);
  for (const std::uint32_t round : {0U, 1U}) {
    auto alone = header(0, round == 0 ? kPush : kPush | kPull, round);
    alone.kind = tensor::OperationKind::kSplit;
    if (round == 1) share_memory();
    round == 0 ? (void)land(0, alone) : post(0, alone);
  }
  engine.gone().leave(0, "worker 0 has left the job");
  on_lost(*sessions[0], "worker 0 is lost");
  engine.fail_lost();
  EXPECT_EQ(engine.open_rounds(), 1U) << "the one that cannot be read has failed";
  for (const std::uint32_t i : {1U, 2U}) {
    auto both = header(i, kPush | kPull);
    both.kind = tensor::OperationKind::kSplit;
    land(i, both);
  }
  for (const std::uint32_t i : {1U, 2U}) EXPECT_EQ(memory[i].back(), 6);
  EXPECT_EQ(engine.open_rounds(), 0U);
  land(1, header(1, kPush | kPull, 2));
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].what, "worker 0 has left the job");
}

TEST_F(RoundEngineTest, APushThatIsOvertakenByItsCancelIsNotSummed) {
  use_slots(2);
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(100)).aborted.size(), 1U);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush | kPull));
  EXPECT_EQ(engine.open_rounds(), 0U);
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_TRUE(data(i).writes.empty());
}

TEST_F(RoundEngineTest, APullAfterItsCancelledPushIsToldWhatToDo) {
  use_slots(2);
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(100)).aborted.size(), 1U);
  for (std::uint32_t i = 1; i < kWorkers; ++i) land(i, header(i, kPush | kPull));
  land(0, header(0, kPush));  // overtaken
  ASSERT_EQ(engine.open_rounds(), 0U);
  land(0, header(0, kPull));
  const std::vector<tensor::PushFailed> told = failures(0);
  ASSERT_EQ(told.size(), 2U);
  EXPECT_EQ(told[0].code, ErrorCode::kInternal) << "of the push, and nobody waits for it";
  EXPECT_EQ(told[1].code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(told[1].hint, "push again before the pull");
}

TEST_F(RoundEngineTest, WhatHasBeenSummedCannotBeCancelled) {
  use_slots(2);
  data(0).room = 0;  // the answer waits for the send window
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush | kPull));
  const tensor::Cancelled reply = engine.cancel(*sessions[0], cancel_of(100));
  EXPECT_EQ(reply.answered, (std::vector<std::uint32_t>{100}));
  EXPECT_TRUE(reply.aborted.empty());
  data(0).room = 1;
  EXPECT_TRUE(sessions[0]->answers().flush());
  EXPECT_EQ(sum_in_slot(data(0).writes.at(0)), 6);
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes.at(0).token);
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(100)).answered.size(), 1U) << "also when the round is over";
}

TEST_F(RoundEngineTest, APullThatWasCancelledIsNeverAnswered) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush));
  for (std::uint32_t i = 0; i < kWorkers; ++i) data(i).writes.clear();  // the pushes were acknowledged
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(150)).aborted.size(), 1U);
  land(0, header(0, kPull));
  EXPECT_TRUE(data(0).writes.empty()) << "its memory is the caller's again";
  land(1, header(1, kPull));
  EXPECT_EQ(sum_in_slot(data(1).writes.at(0)), 6) << "the sum itself is good";
}

TEST_F(RoundEngineTest, APushAndAPullOfOneRoundAreCancelledOneByOne) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kPush));
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(100)).aborted.size(), 1U);
  const tensor::Cancelled reply = engine.cancel(*sessions[0], cancel_of(150));
  EXPECT_EQ(reply.aborted, (std::vector<std::uint32_t>{150})) << "the worker would wait for an answer for ever";
}

TEST_F(RoundEngineTest, APullThatWaitsFailsWhenThePushOfItsRankIsCancelled) {
  use_slots(2);
  land(0, header(0, kPush));
  land(0, header(0, kPull));
  EXPECT_EQ(engine.cancel(*sessions[0], cancel_of(100)).aborted.size(), 1U);
  ASSERT_EQ(failures(0).size(), 1U)
      << "no Cancel of the pull needs to follow, and the round may be over before it comes";
  EXPECT_EQ(failures(0)[0].immediate, 150U);
  EXPECT_EQ(failures(0)[0].code, ErrorCode::kTimeout);
}

TEST_F(RoundEngineTest, AWorkerThatOpensTooManyRoundsIsLostAndTheOthersGoOn) {
  share_memory();
  engine.add_group(van::Group{4, {0, 1}});
  const auto of_two = [this](std::uint32_t worker, std::uint32_t round) {
    auto made = header(worker, kPush | kPull, round);
    made.group = 4;
    return made;
  };
  for (std::uint32_t round = 0; round < kMostRounds; ++round) post(2, header(2, kPush | kPull, round));
  EXPECT_FALSE(sessions[2]->is_lost()) << "so many may wait for the others";
  post(2, header(2, kPush | kPull, kMostRounds));
  EXPECT_TRUE(sessions[2]->is_lost());
  EXPECT_EQ(counters.excess.get(), 1U);
  engine.fail_lost();
  for (std::uint32_t round = 0; round < 2 * kMostRounds; ++round) {
    for (std::uint32_t i = 0; i < 2; ++i) post(i, of_two(i, round));
  }
  EXPECT_EQ(counters.rounds.get(), 2 * kMostRounds) << "rounds that are over do not count";
  EXPECT_EQ(counters.excess.get(), 1U);
}

TEST_F(RoundEngineTest, AWorkerThatCancelsTooManyRoundsIsLost) {
  tensor::Cancel many = cancel_of(100);
  for (std::uint32_t i = 1; i <= kMostRounds; ++i) many.partitions.push_back({100 + i, i});
  (void)engine.cancel(*sessions[2], many);
  EXPECT_TRUE(sessions[2]->is_lost());
  EXPECT_EQ(counters.excess.get(), 1U);
}

TEST_F(RoundEngineTest, AnotherEpochsPushesAreDroppedAndCounted) {
  use_slots(1);
  auto old = header(0, kPush | kPull);
  old.epoch = 7;
  land(0, old);
  EXPECT_EQ(engine.open_rounds(), 0U);
  EXPECT_EQ(counters.stale.get(), 1U);
  EXPECT_TRUE(failures(0).empty());
}

}  // namespace
}  // namespace bps::server
