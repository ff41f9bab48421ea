// SPDX-License-Identifier: Apache-2.0
// Rounds through a whole server loop: right sums, and no harm from wrong pushes.
#include "server/server_loop_fixture.h"

namespace bps::server {
namespace {

TEST_F(ServerLoopTest, SumsWhenTheLastOneHasPushed) {
  push(2, header(2));
  push(0, header(0));
  EXPECT_TRUE(workers[0].answers.empty());
  EXPECT_EQ(server_loop->open_rounds(), 1U);
  push(1, header(1));
  expect_sum(6);
  for (std::uint32_t i = 0; i < kWorkers; ++i) EXPECT_EQ(workers[i].answers[100 + i], 1);
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  EXPECT_EQ(counters.copies.get(), 0U);
}

TEST_F(ServerLoopTest, WrongPushesAreRefusedAndHarmNothing) {
  std::vector<tensor::PushHeader> wrong(12, header(0));
  wrong[0].version = 99;
  wrong[1].dtype = static_cast<Dtype>(77);
  wrong[2].op = static_cast<ReduceOp>(9);
  wrong[3].flags = 0;
  wrong[4].flags = tensor::kHasPayload | tensor::kIsPull;
  wrong[5].position = 1;  // somebody else's place
  wrong[6].position = 60000;
  wrong[7].group = 1234;
  wrong[8].length = 0;
  wrong[9].length = 4001;  // no whole elements
  wrong[10].length = ~std::uint32_t{0} - 3;
  wrong[11].length = 8000;  // longer than what is posted
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    push(0, wrong[i]);
    EXPECT_EQ(workers[0].failures.size(), i + 1) << i;
  }
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  EXPECT_EQ(counters.stale.get(), wrong.size());
  const tensor::PushHeader whole = header(0);
  const transport::Posting garbage{.header = tensor::bytes_of(whole).first(63), .source = nullptr, .length = 0};
  workers[0].data->direct()->post({&garbage, 1});
  settle();
  for (std::uint32_t i = 0; i < kWorkers; ++i) push(i, header(i));
  expect_sum(6);
}

TEST_F(ServerLoopTest, DuplicatesAndStalePushesAreRefused) {
  push(0, header(0));
  push(0, header(0));
  EXPECT_EQ(workers[0].failures.size(), 1U);
  push(1, header(1));
  push(2, header(2));
  expect_sum(6);
  push(1, header(1));  // the round is over
  EXPECT_EQ(workers[1].failures.size(), 1U);
  expect_sum(6);
  push(1, header(1, 100'000));  // other servers may have summed those between
  EXPECT_EQ(workers[1].failures.size(), 1U);
  EXPECT_EQ(server_loop->open_rounds(), 1U);
}

TEST_F(ServerLoopTest, TwoRoundsNeverMix) {
  push(0, header(0, 0));
  tensor::PushHeader next = header(0, 1);
  next.immediate = 900;
  push(0, next);
  push(1, header(1, 0));
  push(2, header(2, 0));
  EXPECT_EQ(workers[0].answers[100], 1);
  EXPECT_EQ(workers[0].answers.count(900), 0U);
  EXPECT_EQ(server_loop->open_rounds(), 1U);
}

TEST_F(ServerLoopTest, DisagreementReachesEveryoneAndTheNextRoundWorks) {
  push(0, header(0));
  tensor::PushHeader other = header(1);
  other.op = ReduceOp::kMax;
  push(1, other);
  push(2, header(2));
  for (const FakeWorker& w : workers) {
    ASSERT_EQ(w.failures.size(), 1U);
    EXPECT_EQ(w.failures[0].code, ErrorCode::kMismatch);
    EXPECT_NE(w.failures[0].what.find("rank 0"), std::string::npos);
  }
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  for (std::uint32_t i = 0; i < kWorkers; ++i) push(i, header(i, 1));
  expect_sum(6);
}

TEST_F(ServerLoopTest, AGroupAveragesOverItsOwnSize) {
  for (const std::uint32_t i : {0U, 2U}) {
    tensor::PushHeader h = header(i);
    h.group = 5;
    h.position = i == 0 ? 0 : 1;
    h.op = ReduceOp::kAverage;
    push(i, h);
  }
  EXPECT_EQ(workers[0].tensor[999], 2);
  EXPECT_EQ(workers[2].tensor[0], 2);
  EXPECT_EQ(workers[1].tensor[0], 2);  // its own, untouched
  EXPECT_TRUE(workers[1].answers.empty());
}

// Rank 1 is not in group 5. It can neither meet a round of that group by naming another group, nor open one before it.
TEST_F(ServerLoopTest, ARoundOfAnotherGroupIsAnotherRound) {
  push(1, header(1));
  for (const std::uint32_t worker : {0U, 2U}) {
    tensor::PushHeader h = header(worker);
    h.group = 5;
    h.position = worker == 0 ? 0 : 1;
    push(worker, h);
    if (worker == 0) {
      (void)workers[1].control->send(
          encode(tensor::Cancel{0, h.tensor, 0, ErrorCode::kTimeout, "", "", {{101, 0}}}, 1));
      settle();
    }
  }
  EXPECT_EQ(workers[0].tensor[0], 4);
  EXPECT_EQ(workers[2].tensor[0], 4);
  EXPECT_TRUE(workers[0].failures.empty());
  EXPECT_TRUE(workers[2].failures.empty());
}

TEST_F(ServerLoopTest, PushAndPullApart) {
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader h = header(i);
    h.flags = tensor::kHasPayload | tensor::kIsPush;
    push(i, h);
    EXPECT_EQ(workers[i].answers[100 + i], 1);  // the memory is free again
    for (float& x : workers[i].tensor) x = -1;  // and is reused
  }
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    tensor::PushHeader h = header(i);
    h.flags = tensor::kIsPull | tensor::kWantsData;
    push(i, h, 0);
    EXPECT_EQ(workers[i].answers[100 + i], 2);
  }
  expect_sum(6);
  EXPECT_EQ(server_loop->open_rounds(), 0U);
}

}  // namespace
}  // namespace bps::server
