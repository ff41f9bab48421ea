// SPDX-License-Identifier: Apache-2.0
// Rounds in two phases: answers land beside the inputs, and count when every member has its own.
#include "server/round_engine_fixture.h"

namespace bps::server {
namespace {

constexpr std::uint8_t kBoth = kPush | kPull | tensor::kTwoPhase;
constexpr std::uint8_t kNoData = kPush | tensor::kIsPull | tensor::kTwoPhase;

class TwoPhaseTest : public RoundEngineTest {
 protected:
  void land(std::uint32_t worker, const tensor::PushHeader& what) { RoundEngineTest::land(worker, what); }
  void confirm(std::uint32_t worker, std::uint32_t round = 0) {
    const std::uint32_t immediate = header(worker, kBoth, round).immediate;
    engine.on_landed(*sessions[worker], {&immediate, 1});
  }
  std::vector<std::uint32_t> committed(std::uint32_t worker) {
    sessions[worker]->answers().send_commits(1);
    std::vector<std::uint32_t> all;
    for (const auto& message : control(worker).sent<tensor::Committed>()) {
      all.insert(all.end(), message.immediates.begin(), message.immediates.end());
    }
    control(worker).messages.clear();
    return all;
  }
};

using Immediates = std::vector<std::uint32_t>;

TEST_F(TwoPhaseTest, AResultCountsWhenAllHaveIt) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    EXPECT_EQ(data(i).immediates(), Immediates{100 + i});
    EXPECT_EQ(sum_in_slot(data(i).writes[0]), 6);
    engine.on_written(data(i).writes[0].token);
  }
  EXPECT_EQ(engine.open_rounds(), 1U);
  confirm(1);
  confirm(0);
  EXPECT_FALSE(due.commits);
  confirm(0);
  EXPECT_EQ(counters.stale.get(), 1U) << "a member confirms for itself, and once";
  EXPECT_FALSE(due.commits);
  confirm(2);
  EXPECT_TRUE(due.commits);
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(committed(i), Immediates{100 + i});
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// The worker can send more into it meanwhile.
TEST_F(TwoPhaseTest, TheSlotOfAResultIsFreeWhenItHasLeft) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    EXPECT_EQ(slots[0].size(), 1U);
    engine.on_written(data(i).writes[0].token);
    collect_credits(0);
  }
  EXPECT_EQ(slots[0].size(), 2U);
  EXPECT_EQ(engine.open_rounds(), 1U) << "nobody has confirmed it";
}

TEST_F(TwoPhaseTest, TheSlotOfAResultThatIsWrittenInPlaceIsFreeAtOnce) {
  use_slots(0, 1);
  for (const std::uint32_t i : {1U, 2U}) data(i).put_on_same_host();
  land(0, header(0, kNoData));
  for (const std::uint32_t i : {1U, 2U}) post(i, header(i, kBoth));
  EXPECT_EQ(memory[2].back(), 6);
  EXPECT_EQ(engine.open_rounds(), 1U) << "they have not confirmed it";
  collect_credits(0);
  EXPECT_EQ(slots[0].size(), 1U);
}

TEST_F(TwoPhaseTest, WhoWantsNoDataIsToldWithTheOthers) {
  use_slots(2);
  land(0, header(0, kBoth));
  land(1, header(1, kNoData));
  land(2, header(2, kNoData));
  EXPECT_TRUE(data(1).writes.empty());
  EXPECT_TRUE(committed(1).empty()) << "its input may still be needed";
  engine.on_written(data(0).writes.at(0).token);
  confirm(0);
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(committed(i), Immediates{100 + i});
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(TwoPhaseTest, ARoundWithoutDataIsCompleteAtOnce) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kNoData));
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(committed(i), Immediates{100 + i});
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(TwoPhaseTest, WhatIsInBuffersOfThisHostIsConfirmedToo) {
  share_memory();
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, header(i, kBoth));
  EXPECT_EQ(memory[2].back(), 6);
  EXPECT_EQ(engine.open_rounds(), 1U);
  for (std::uint32_t i = 0; i < kWorkers; ++i) confirm(i);
  EXPECT_EQ(committed(2), Immediates{102});
  EXPECT_EQ(engine.open_rounds(), 0U);
}

// ---- With a redo log

class LoggedTest : public TwoPhaseTest {
 protected:
  LoggedTest() { engine.log_to(&log_); }
  tensor::PushHeader logged(std::uint32_t worker, std::uint32_t round = 0) {
    tensor::PushHeader made = header(worker, kBoth, round);
    made.place = tensor::PushHeader::kLogged;
    return made;
  }
  // All but the last rank share memory with the server.
  void share_but_last() {
    for (std::uint32_t i = 0; i + 1 < kWorkers; ++i) data(i).put_on_same_host();
    use_slots(kWorkers - 1, 2);
  }
  void push_all(std::uint32_t round = 0) {
    for (std::uint32_t i = 0; i + 1 < kWorkers; ++i) post(i, logged(i, round));
    land(kWorkers - 1, header(kWorkers - 1, kBoth, round));
  }
  std::vector<std::byte> memory_ = std::vector<std::byte>(tensor::RedoLog::bytes() + 64);
  tensor::RedoLog log_{aligned()};

 private:
  std::span<std::byte> aligned() {
    const std::size_t past = reinterpret_cast<std::uintptr_t>(memory_.data()) % 64;
    return std::span(memory_).subspan(past == 0 ? 0 : 64 - past);
  }
};

TEST_F(LoggedTest, AnAnswerIsTheLastWord) {
  share_memory();
  for (std::uint32_t i = 0; i < kWorkers; ++i) post(i, logged(i));
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(data(i).immediates(), Immediates{100 + i});
  EXPECT_EQ(memory[0].front(), 6);
  EXPECT_EQ(engine.open_rounds(), 0U);
  const auto last = log_.last_of({0, 11, 0, 0}, kBytes);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->end(), kBytes);
}

TEST_F(LoggedTest, WhereNotAllReadTheLogThoseWhoDoAreToldLast) {
  share_but_last();
  push_all();
  EXPECT_EQ(memory[0].front(), 6);
  EXPECT_TRUE(data(0).writes.empty()) << "the last rank may lose what it is sent";
  EXPECT_EQ(data(2).immediates(), Immediates{102});
  engine.on_written(data(2).writes[0].token);
  confirm(2);
  EXPECT_EQ(data(0).immediates(), Immediates{100});
  EXPECT_EQ(data(1).immediates(), Immediates{101});
  EXPECT_EQ(committed(2), Immediates{102});
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(LoggedTest, TheLogTellsOfARoundUntilAllWhoReadItHaveTheirAnswers) {
  share_but_last();
  push_all(0);
  push_all(1);
  EXPECT_EQ(data(2).writes.size(), 1U) << "round 1 waits";
  EXPECT_FALSE(engine.resume());
  EXPECT_TRUE(log_.last_of({0, 11, 0, 0}, kBytes));
  data(0).room = 0;  // its ring is full
  engine.on_written(data(2).writes[0].token);
  confirm(2, 0);
  EXPECT_FALSE(engine.resume());
  EXPECT_TRUE(log_.last_of({0, 11, 0, 0}, kBytes));
  data(0).room = 10;
  EXPECT_TRUE(sessions[0]->answers().flush());
  EXPECT_TRUE(engine.resume());
  EXPECT_TRUE(log_.last_of({0, 11, 1, 0}, kBytes));
}

// Who reads the log finds the result that it has not been told of.
TEST_F(LoggedTest, TheLogTellsOfARoundThatFailsAfterItsSumUpToTheEndOfTheView) {
  share_but_last();
  push_all(0);
  engine.on_written(data(2).writes[0].token);
  on_lost(*sessions[2], "worker 2 is lost");
  engine.fail_lost();
  EXPECT_EQ(failures(0).size(), 1U);
  for (std::uint32_t i = 0; i < 2; ++i) post(i, logged(i, 1));
  (void)engine.resume();
  EXPECT_TRUE(log_.last_of({0, 11, 0, 0}, kBytes));
}

// Its connection has broken, and no member of the job is lost.
TEST_F(LoggedTest, TheLogTellsOfARoundWhoseAnswerCannotBePostedUpToTheEndOfTheView) {
  share_but_last();
  push_all(0);
  push_all(1);
  on_lost(*sessions[0], "its connection broke");
  sessions[0]->abandon(false);
  engine.on_written(data(2).writes[0].token);
  confirm(2, 0);
  EXPECT_FALSE(engine.resume());
  EXPECT_TRUE(log_.last_of({0, 11, 0, 0}, kBytes));
}

TEST_F(TwoPhaseTest, PhasesAreTheSameForAll) {
  use_slots(2);
  land(0, header(0, kBoth));
  land(1, header(1, kPush | kPull));
  ASSERT_EQ(failures(0).size(), 1U);
  EXPECT_EQ(failures(0)[0].code, ErrorCode::kMismatch);
}

TEST_F(TwoPhaseTest, AMemberThatIsLostBeforeItConfirmsFailsTheRoundForTheOthers) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes[0].token);
  confirm(0);
  on_lost(*sessions[1], "worker 1 is lost");
  engine.fail_lost();
  for (const std::uint32_t i : {0U, 2U}) {
    ASSERT_EQ(failures(i).size(), 1U);
    EXPECT_EQ(failures(i)[0].immediate, 100 + i);
    EXPECT_EQ(failures(i)[0].code, ErrorCode::kPeerLost);
  }
  EXPECT_EQ(engine.open_rounds(), 0U);
  confirm(2);
  EXPECT_EQ(counters.stale.get(), 2U + 1U) << "two refusals, and what comes too late";
  EXPECT_TRUE(committed(0).empty());
}

TEST_F(TwoPhaseTest, AMemberThatLeavesBeforeItConfirmsFailsTheRoundToo) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes[0].token);
  engine.gone().leave(1, "worker 1 has left");
  engine.fail_lost();
  EXPECT_EQ(failures(0).size(), 1U);
  EXPECT_EQ(failures(2).size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(TwoPhaseTest, ACancelledMemberWaitsForTheOutcome) {
  use_slots(2);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes[0].token);
  confirm(0);
  const tensor::Cancelled reply =
      engine.cancel(*sessions[0], {0, 11, 0, ErrorCode::kTimeout, "rank 0 gave up", "", {{100, 0}}});
  EXPECT_EQ(reply.pending, Immediates{100}) << "others may have the result, so that all will";
  confirm(1);
  confirm(2);
  EXPECT_EQ(committed(0), Immediates{100});
}

// A member that lies: what it says of its own rounds changes none that comes to lie where they were.
TEST_F(TwoPhaseTest, ACancelOfWhatNobodyHasPushedEndsNoRoundThatIsLanding) {
  use_slots(3);
  tensor::PushHeader alone = header(0, kBoth);
  alone.group = tensor::kAlone | 0;
  alone.immediate = 7;
  land(0, alone);
  engine.on_written(data(0).writes.at(0).token);
  const tensor::Cancelled reply =
      engine.cancel(*sessions[0], {alone.group, 11, 0, ErrorCode::kTimeout, "rank 0 gave up", "", {{8, 0}}});
  EXPECT_EQ(reply.aborted, Immediates{8});
  EXPECT_EQ(engine.open_rounds(), 1U) << "it has been answered, and has not said so";
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes.back().token);
  const std::uint32_t of_its_own = 7;
  engine.on_landed(*sessions[0], {&of_its_own, 1});
  EXPECT_EQ(committed(0), Immediates{7});
  confirm(0);
  confirm(1);
  EXPECT_TRUE(committed(1).empty()) << "rank 2 does not have it";
  confirm(2);
  EXPECT_EQ(committed(1), Immediates{101});
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(TwoPhaseTest, AFailureTakesTheLandingsOfItsOwnRoundAlone) {
  use_slots(3);
  tensor::PushHeader alone = header(0, kBoth);
  alone.group = tensor::kAlone | 0;
  alone.immediate = 100;  // as that of the round of all
  land(0, alone);
  for (std::uint32_t i = 0; i < kWorkers; ++i) land(i, header(i, kBoth));
  engine.on_written(data(0).writes.at(0).token);
  for (std::uint32_t i = 0; i < kWorkers; ++i) engine.on_written(data(i).writes.back().token);
  engine.gone().leave(2, "worker 2 has left");
  engine.fail_lost();
  EXPECT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(engine.open_rounds(), 1U);
  confirm(0);
  EXPECT_EQ(engine.open_rounds(), 0U);
  EXPECT_EQ(committed(0), Immediates{100});
}

TEST_F(TwoPhaseTest, ARoundThatIsNotSummedIsCancelledAsAlways) {
  use_slots(2);
  land(0, header(0, kBoth));
  land(1, header(1, kBoth));
  const tensor::Cancelled reply =
      engine.cancel(*sessions[0], {0, 11, 0, ErrorCode::kTimeout, "rank 0 gave up", "", {{100, 0}}});
  EXPECT_EQ(reply.aborted, Immediates{100});
  ASSERT_EQ(failures(1).size(), 1U);
}

}  // namespace
}  // namespace bps::server
