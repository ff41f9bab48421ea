// SPDX-License-Identifier: Apache-2.0
// In two phases, over a network: when a worker tells the server that answers have landed.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/fake_transport.h"
#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

constexpr std::uint64_t kPiece = 1024;

class BulkLandingTest : public ::testing::Test {
 protected:
  BulkLandingTest() {
    transport.in_order = true;
    server = &worker_loop.add_server(0, 1, "server", transport);
    control.sink = server;
    data.sink = server;
    worker_loop.open(*server, &control, {&data});
    tensor::Credits credits;
    for (std::uint32_t i = 0; i < 64; ++i)
      credits.slots.push_back({tensor::SlotNumber(i), 1, std::uint64_t{i} << 20, 2 * kPiece});
    server->on_message(control, encode(credits, 1));
  }
  std::shared_ptr<Operation> submit(std::uint32_t pieces,
                                    tensor::OperationKind kind = tensor::OperationKind::kPushPull) {
    const std::uint64_t bytes = kPiece * pieces;
    memory.emplace_back(bytes);
    const tensor::Partitioning cut(bytes, 4, kPiece);
    auto tensor = std::make_shared<Tensor>(cut, cut);
    tensor->name = "tensor";
    tensor->id = static_cast<std::uint32_t>(memory.size());
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
    tensor->dtype = Dtype::kFloat32;
    tensor->bytes = bytes;
    tensor->is_on_one_host = on_one_host;
    tensor->whole_plan.resize(1);
    for (std::uint32_t i = 0; i < pieces; ++i) tensor->whole_plan[0].push_back({i});
    Request request;
    request.kind = kind;
    request.root = 1;
    request.two_phase = true;
    request.input = request.output = memory.back().data();
    request.input_allocation = request.output_allocation = {memory.back(), memory.size()};
    auto operation = std::make_shared<Operation>(tensor, request, 0, sequence++, 1, 1);
    worker_loop.submit(operation, true);
    worker_loop.step();
    return operation;
  }
  void land(std::size_t which) {
    server->on_write(data, header_of(which).immediate, kPiece);
    worker_loop.step();
  }
  tensor::PushHeader header_of(std::size_t which) const {
    return *codec::decode_front<tensor::PushHeader>(data.headers.at(which));
  }
  std::vector<std::size_t> told() const {
    std::vector<std::size_t> sizes;
    for (const tensor::Landed& one : control.sent<tensor::Landed>()) sizes.push_back(one.immediates.size());
    return sizes;
  }

  server::FakeTransport transport;
  server::FakeControl control{transport::Hello{}};
  server::FakeData data{transport::Hello{}};
  transport::Reactor reactor{"test", transport::Spin{}};
  std::vector<std::vector<std::byte>> memory;
  WorkerLoop worker_loop{
      WorkerLoopOptions{.index = 0, .places = 1, .largest_partition = kPiece, .staging_bytes = 64 * kPiece}, reactor};
  ServerConnection* server = nullptr;
  std::uint64_t sequence = 0;
  bool on_one_host = false;
};

TEST_F(BulkLandingTest, TheLastAnswerTellsOfAllBefore) {
  const auto operation = submit(3);
  ASSERT_EQ(data.writes.size(), 3U);
  land(0);
  land(1);
  EXPECT_EQ(told(), std::vector<std::size_t>{}) << "the others need the last one, too";
  land(2);
  EXPECT_EQ(told(), std::vector<std::size_t>{3});
}

TEST_F(BulkLandingTest, ALargeTensorIsToldOfInPieces) {
  const auto operation = submit(20);
  for (std::size_t i = 0; i < 20; ++i) land(i);
  EXPECT_EQ(told(), (std::vector<std::size_t>{8, 8, 4}));
}

TEST_F(BulkLandingTest, WhatLandsAfterACancelIsToldAtOnce) {
  const auto operation = submit(3);
  worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  land(0);
  EXPECT_EQ(told(), std::vector<std::size_t>{1}) << "the last one may never be summed";
}

// It holds up their next sum.
TEST_F(BulkLandingTest, WhereOthersReadALogTheServerIsToldAtOnce) {
  server->log.others_may_read = true;
  on_one_host = true;
  const auto operation = submit(3);
  land(0);
  EXPECT_EQ(told(), std::vector<std::size_t>{1});
}

TEST_F(BulkLandingTest, WhatLandsAfterTheLastIsToldAtOnce) {
  const auto operation = submit(3);
  land(2);
  land(0);
  land(1);
  EXPECT_EQ(told(), (std::vector<std::size_t>{1, 1, 1}));
}

// Of a root's push the server keeps the credit until the others have told it.
TEST_F(BulkLandingTest, ABroadcastIsToldOfAtOnce) {
  const auto operation = submit(3, tensor::OperationKind::kBroadcast);
  ASSERT_EQ(data.writes.size(), 3U);
  land(0);
  EXPECT_EQ(told(), std::vector<std::size_t>{1});
}

TEST_F(BulkLandingTest, BeforeACancelTheServerHearsOfWhatHasLanded) {
  const auto operation = submit(3);
  land(0);
  worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  ASSERT_EQ(told(), std::vector<std::size_t>{1});
  const auto is_landed = [](const auto& message) { return std::holds_alternative<tensor::Landed>(message); };
  const auto is_cancel = [](const auto& message) { return std::holds_alternative<tensor::Cancel>(message); };
  EXPECT_LT(std::ranges::find_if(control.messages, is_landed), std::ranges::find_if(control.messages, is_cancel));
}

}  // namespace
}  // namespace bps::worker
