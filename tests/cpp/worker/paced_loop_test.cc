// SPDX-License-Identifier: Apache-2.0
// What a worker loop does when the pace of an operation says "not now".
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "eventually.h"
#include "worker/relaying_loop.h"

namespace bps::worker {
namespace {

constexpr std::uint32_t kPartitions = 4;

class PacedLoop : public RelayingLoop {
 protected:
  PacedLoop() : RelayingLoop(2) {}
  // An operation whose partitions go by this process, as the relay, to two servers; but for one that goes to it as a
  // server, if so wanted. One may be under way to each.
  std::shared_ptr<Operation> submit_by_relay(std::uint32_t direct = kPartitions) {
    const tensor::Partitioning cut(kBytes, 4, kBytes / kPartitions);
    auto made = std::make_shared<Tensor>(cut, cut);
    made->name = "tensor";
    made->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    made->dtype = Dtype::kFloat32;
    made->bytes = kBytes;
    made->ahead = 1;
    made->plans.whole.resize(2);
    for (std::uint32_t i = 0; i < kPartitions; ++i) {
      made->plans.whole[0].push_back({.partition = i, .place = i == direct ? Part::kDirect : i % 2, .turn = i});
    }
    Request request;
    request.input = request.output = memory.data();
    request.input_allocation = request.output_allocation = {memory, 1};
    auto operation = std::make_shared<Operation>(made, request, 0, 0, 1, places);
    worker_loop->submit(operation, true);
    worker_loop->step();
    return operation;
  }
  // Answers the push that was sent as number `nth`.
  void answer(std::size_t nth) {
    const auto push = codec::decode<tensor::PushHeader>(data.headers.at(nth));
    data.sink->on_write(data, push.value().immediate, push.value().length);
    worker_loop->step();
  }
};

TEST_F(PacedLoop, AnAnswerLetsTheNextPartitionGo) {
  const auto operation = submit_by_relay();
  EXPECT_EQ(data.posted, 2U);
  answer(0);
  EXPECT_EQ(data.posted, 3U);
  for (std::size_t nth = 1; nth < kPartitions; ++nth) answer(nth);
  EXPECT_TRUE(operation->is_done());
}

TEST_F(PacedLoop, AProcessMayBeARelayAndAServerToOneOperation) {
  const auto operation = submit_by_relay(2);
  EXPECT_EQ(data.posted, 2U);
  for (std::size_t nth = 0; nth < kPartitions; ++nth) answer(nth);
  EXPECT_TRUE(operation->is_done());
}

// Members of the host may have started them in another order.
TEST_F(PacedLoop, WithinAHostAnotherOperationPasses) {
  const auto first = submit_by_relay();
  ASSERT_EQ(data.posted, 2U);
  const auto second = submit();
  EXPECT_EQ(data.posted, 3U);
  answer(2);
  EXPECT_TRUE(second->is_done());
  EXPECT_FALSE(first->is_done());
  worker_loop->leave(Error(ErrorCode::kRoundAborted, "the test is over", ""));
}

// Its answers may be what the pace waits for: all would wait for each other.
TEST_F(PacedLoop, WhatTheHostContributesDoesNotWaitForThePace) {
  const auto operation = submit_by_relay();
  ASSERT_EQ(data.posted, 2U);
  worker_loop->relay().contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->step();
  EXPECT_EQ(data.posted, 3U);
  worker_loop->leave(Error(ErrorCode::kRoundAborted, "the test is over", ""));
}

// What has passed fails if there is no memory for it, and not the operation that was passed.
TEST_F(PacedLoop, ABufferThatCannotBeMadeFailsTheOneThatNeedsIt) {
  const auto operation = submit_by_relay();
  ASSERT_EQ(data.posted, 2U);
  transport.out_of_memory = true;
  worker_loop->relay().contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->step();
  EXPECT_FALSE(operation->is_failing());
  const auto cancels = control.sent<tensor::Cancel>();
  ASSERT_EQ(cancels.size(), 1U);
  EXPECT_EQ(cancels[0].what, "no memory");
  worker_loop->leave(Error(ErrorCode::kRoundAborted, "the test is over", ""));
}

TEST_F(PacedLoop, OneBufferIsMadeForOneThatIsCancelled) {
  const auto operation = submit_by_relay();
  ASSERT_EQ(data.posted, 2U);
  worker_loop->relay().contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->relay().cancel(0, Error(ErrorCode::kRoundAborted, "a rank of this host is lost", ""));
  const std::uint64_t registered = worker_loop->usage().registered_bytes;
  for (int turn = 0; turn < 20; ++turn) worker_loop->step();
  EXPECT_EQ(worker_loop->usage().registered_bytes, registered);
  EXPECT_EQ(data.posted, 2U);
  worker_loop->leave(Error(ErrorCode::kRoundAborted, "the test is over", ""));
}

// Two servers over a network; one partition of an operation may be under way to each.
class PacedNetwork : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kPiece = 1024;

  PacedNetwork() {
    tensor::Credits credits;
    for (std::uint32_t i = 0; i < 64; ++i) {
      credits.slots.push_back({tensor::SlotNumber(i), 1, std::uint64_t{i} << 20, 2 * kPiece});
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      ServerConnection& server = worker_loop.add_server(i, i + 1, "server", transport);
      controls[i].sink = &server;
      data[i].sink = &server;
      worker_loop.open(server, &controls[i], {&data[i]});
      server.on_message(controls[i], encode(credits, 1));
    }
  }
  void submit(std::uint32_t id) {
    const std::uint64_t bytes = 2 * kPartitions * kPiece;
    memory.emplace_back(bytes);
    const tensor::Partitioning cut(bytes, 4, kPiece);
    auto made = std::make_shared<Tensor>(cut, cut);
    made->name = "tensor";
    made->id = id;
    made->group = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
    made->dtype = Dtype::kFloat32;
    made->bytes = bytes;
    made->ahead = 1;
    made->plans.whole.resize(2);
    for (std::uint32_t i = 0; i < 2 * kPartitions; ++i) made->plans.whole[i % 2].push_back({.partition = i, .turn = i});
    Request request;
    request.input = request.output = memory.back().data();
    request.input_allocation = request.output_allocation = {memory.back(), memory.size()};
    worker_loop.submit(std::make_shared<Operation>(made, request, 0, id, 1, 2), true);
    worker_loop.step();
  }
  // The tensors of the pushes to the first server.
  std::vector<std::uint32_t> pushed() const {
    std::vector<std::uint32_t> ids;
    for (const auto& header : data[0].headers) ids.push_back(codec::decode_front<tensor::PushHeader>(header)->tensor);
    return ids;
  }

  server::FakeTransport transport;
  std::array<server::FakeControl, 2> controls{server::FakeControl{transport::Hello{}},
                                              server::FakeControl{transport::Hello{}}};
  std::array<server::FakeData, 2> data{server::FakeData{transport::Hello{}}, server::FakeData{transport::Hello{}}};
  transport::Reactor reactor{"test", transport::Spin{}};
  std::vector<std::vector<std::byte>> memory;
  WorkerLoop worker_loop{
      WorkerLoopOptions{.index = 0, .places = 2, .largest_partition = 1 << 20, .staging_bytes = 1 << 20}, reactor};
};

// The other ranks may have started them in another order: each would wait until the other one's pace has ended.
TEST_F(PacedNetwork, AnotherOperationPassesOneThatIsNotAnswered) {
  submit(1);
  submit(2);
  EXPECT_EQ(pushed(), (std::vector<std::uint32_t>{1}));
  EXPECT_TRUE(eventually([&] {
    worker_loop.step();
    return pushed().size() > 1;
  }));
  EXPECT_EQ(pushed(), (std::vector<std::uint32_t>{1, 2}));
  worker_loop.leave(Error(ErrorCode::kRoundAborted, "the test is over", ""));
}

}  // namespace
}  // namespace bps::worker
