// SPDX-License-Identifier: Apache-2.0
// Weights that a server keeps.
#include "server/round_engine_fixture.h"

namespace bps::server {
namespace {

class StoredTest : public RoundEngineTest {
 protected:
  // All workers call it; the first one's memory is kept.
  void store() {
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      tensor::PushHeader push = header(i, i == 0 ? kPush | tensor::kIsPull : tensor::kIsPush | kPull, stores_);
      push.kind = tensor::OperationKind::kStore;
      land(i, push);
    }
    ++stores_;
    for (std::uint32_t i = 0; i < kWorkers; ++i) answers(i);
  }
  tensor::PushHeader addition(std::uint32_t worker, std::uint32_t round, std::uint32_t most_ahead = 0) {
    tensor::PushHeader push = header(worker, kPush | kPull, round);
    push.kind = tensor::OperationKind::kAccumulate;
    push.group = tensor::kAlone | worker;
    push.position = 0;
    push.place = most_ahead;
    return push;
  }
  // What a worker has been answered since the last call, all of which has been sent then.
  std::vector<float> answers(std::uint32_t worker) {
    std::vector<float> found;
    for (const transport::WriteOp& write : data(worker).writes) {
      if (write.source != nullptr) found.push_back(sum_in_slot(write));
      if (write.source != nullptr) engine.on_written(write.token);
    }
    data(worker).writes.clear();
    collect_credits(worker);
    return found;
  }
  std::uint32_t stores_ = 0;
};

using Floats = std::vector<float>;

TEST_F(StoredTest, EachRankAddsAndIsAnsweredAtOnce) {
  use_slots(3);
  store();  // 1, that of worker 0
  land(1, addition(1, 0));
  EXPECT_EQ(answers(1), (Floats{3}));
  land(1, addition(1, 1));
  EXPECT_EQ(answers(1), (Floats{5}));
  land(2, addition(2, 0));
  EXPECT_EQ(answers(2), (Floats{8}));
  EXPECT_EQ(engine.open_rounds(), 0U);
  store();
  land(0, addition(0, 0));
  EXPECT_EQ(answers(0), (Floats{2}));
}

TEST_F(StoredTest, OneThatIsTooFarAheadIsAnsweredWithWhatTheOthersHaveAddedMeanwhile) {
  use_slots(4);
  store();
  land(0, addition(0, 0, 2));  // one ahead
  EXPECT_EQ(answers(0), (Floats{2}));
  land(0, addition(0, 1, 2));  // two
  land(1, addition(1, 0));
  EXPECT_TRUE(answers(0).empty()) << "worker 2 has not added anything";
  answers(1);
  ASSERT_EQ(engine.list_open(9).size(), 1U);
  EXPECT_EQ(engine.list_open(9)[0].missing, (std::vector<std::uint32_t>{2}));
  land(2, addition(2, 0));
  EXPECT_EQ(answers(0), (Floats{1 + 2 + 2 + 3}));
  answers(2);
  EXPECT_EQ(engine.open_rounds(), 0U);
}

TEST_F(StoredTest, RanksThatAreGoneAreNotWaitedFor) {
  use_slots(4);
  store();
  land(0, addition(0, 0, 1));
  land(1, addition(1, 0, 1));
  EXPECT_TRUE(answers(0).empty());
  engine.gone().lose(2, "it was lost");
  engine.fail_lost();
  EXPECT_EQ(answers(0), (Floats{4}));
  EXPECT_EQ(answers(1), (Floats{4}));
}

TEST_F(StoredTest, OneThatIsGivenUpStaysAdded) {
  use_slots(4);
  store();
  const tensor::PushHeader push = addition(0, 0, 1);
  land(0, push);
  tensor::Cancel cancel;
  cancel.group = push.group;
  cancel.tensor = push.tensor;
  cancel.round = 0;
  cancel.code = ErrorCode::kTimeout;
  cancel.what = "rank 0 gave up";
  cancel.partitions = {{push.immediate, 0, 0}};
  const tensor::Cancelled reply = engine.cancel(*sessions[0], cancel);
  EXPECT_EQ(reply.aborted, (std::vector<std::uint32_t>{push.immediate}));
  EXPECT_EQ(reply.missing, (std::vector<std::uint32_t>{1, 2}));
  land(1, addition(1, 0));
  land(2, addition(2, 0));
  EXPECT_TRUE(answers(0).empty()) << "nothing is sent for what was given up";
  EXPECT_EQ(answers(2), (Floats{1 + 1 + 2 + 3}));
}

TEST_F(StoredTest, WhatDoesNotFitIsRefused) {
  use_slots(4);
  land(0, addition(0, 0));
  ASSERT_EQ(failures(0).size(), 1U);
  EXPECT_EQ(failures(0)[0].code, ErrorCode::kInvalidArgument) << "nothing is stored";
  store();
  tensor::PushHeader shorter = addition(1, 0);
  shorter.length = kBytes / 2;
  land(1, shorter);
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kMismatch);
  tensor::PushHeader of_another = addition(2, 0);
  of_another.group = tensor::kAlone | 1;
  land(2, of_another);
  ASSERT_EQ(failures(2).size(), 1U) << "nobody adds in the name of another rank";
}

TEST_F(StoredTest, AStoreThatFailsLeavesWhatWasThere) {
  use_slots(6);
  store();
  land(1, addition(1, 0));
  answers(1);
  data(0).put_on_same_host();
  data(0).reachable = false;
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader push = header(i, i == 0 ? kPush | tensor::kIsPull : tensor::kIsPush | kPull, stores_);
    push.kind = tensor::OperationKind::kStore;
    i == 0 ? post(i, push) : static_cast<void>(land(i, push));
  }
  engine.fail_lost();
  for (std::uint32_t i = 1; i < kWorkers; ++i) answers(i);
  land(1, addition(1, 1, 2));
  EXPECT_TRUE(answers(1).empty()) << "it is two ahead of rank 2, as before";
  land(2, addition(2, 0));
  EXPECT_EQ(answers(1), (Floats{1 + 2 + 2 + 3}));
}

TEST_F(StoredTest, AMemberAloneReplacesNothingOfTheOthers) {
  use_slots(4);
  engine.add_group(van::Group{7, {2}});
  store();
  for (const std::uint32_t group : {tensor::kAlone | 2, 7U}) {
    tensor::PushHeader push = header(2, kPush | tensor::kIsPull);
    push.kind = tensor::OperationKind::kStore;
    push.group = group;
    push.position = 0;
    land(2, push);
    answers(2);
  }
  land(1, addition(1, 0));
  EXPECT_EQ(answers(1), (Floats{3})) << "what all have stored, and not what rank 2 has";
}

TEST_F(StoredTest, OneThatIsSentAgainIsAddedOnce) {
  use_slots(6);
  store();
  const auto again = [&](std::uint32_t round, std::uint16_t tries) {
    tensor::PushHeader push = addition(1, round);
    push.place = tensor::Addition{.most_ahead = 0, .tries = tries}.place();
    return push;
  };
  land(1, again(0, 0));
  EXPECT_EQ(answers(1), (Floats{3}));
  land(1, again(1, 1));
  EXPECT_EQ(answers(1), (Floats{3})) << "it has come before";
  land(1, again(2, 0));
  EXPECT_EQ(answers(1), (Floats{5}));
  land(1, again(4, 1));
  EXPECT_EQ(answers(1), (Floats{7})) << "what was sent first in round 3 has never come";
  land(1, again(5, 2));
  EXPECT_EQ(answers(1), (Floats{7}));
}

TEST_F(StoredTest, WhatIsTakenBackIsNotKept) {
  use_slots(4);
  store();
  land(1, addition(1, 0));
  answers(1);
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader push = header(i, tensor::kIsPush | kPull, stores_);
    push.kind = tensor::OperationKind::kStore;
    push.root = tensor::PushHeader::kNobody;
    land(i, push);
  }
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(answers(i), (Floats{3}));
  land(1, addition(1, 1));
  ASSERT_EQ(failures(1).size(), 1U);
  EXPECT_EQ(failures(1)[0].code, ErrorCode::kInvalidArgument);
}

TEST_F(StoredTest, AStoreWhoseRootsDifferChangesNothing) {
  use_slots(4);
  store();
  for (std::uint32_t i = 0; i < kWorkers; ++i) {  // each names another member, and so nobody sends anything
    tensor::PushHeader push = header(i, tensor::kIsPush | kPull, stores_);
    push.kind = tensor::OperationKind::kStore;
    push.root = (i + 1) % kWorkers;
    land(i, push);
  }
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    ASSERT_EQ(failures(i).size(), 1U);
    EXPECT_EQ(failures(i)[0].code, ErrorCode::kMismatch);
    EXPECT_TRUE(answers(i).empty());
  }
  land(1, addition(1, 0));
  EXPECT_EQ(answers(1), (Floats{3})) << "they keep what they kept";
}

TEST(MemoryShares, EachMemberBearsItsPart) {
  MemoryShares shares(10'000);
  const std::vector<std::uint32_t> all{0, 1, 2, 3};
  const std::vector<std::uint32_t> one{2};
  EXPECT_TRUE(shares.take(all, 30'000));
  EXPECT_FALSE(shares.take(one, 4'000));
  EXPECT_FALSE(shares.take(one, ~std::uint64_t{0} - 1000));
  EXPECT_TRUE(shares.take(one, 1'000));
  EXPECT_FALSE(shares.take(all, 8'000)) << "rank 2 has no room";
  shares.give_back(one, 1'000);
  EXPECT_TRUE(shares.take(all, 8'000));
}

TEST_F(StoredTest, InPlace) {
  share_memory();
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader push = header(i, i == 0 ? kPush | tensor::kIsPull : tensor::kIsPush | kPull);
    push.kind = tensor::OperationKind::kStore;
    post(i, push);
  }
  EXPECT_EQ(memory[2].front(), 1);
  post(2, addition(2, 0));
  EXPECT_EQ(memory[2].back(), 2);
  post(2, addition(2, 1));
  EXPECT_EQ(memory[2].back(), 4);
}

}  // namespace
}  // namespace bps::server
