// SPDX-License-Identifier: Apache-2.0
// A worker loop with a connection over each of two rails to one server, which the test plays.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/fake_transport.h"
#include "worker/worker_loop.h"

namespace bps::worker::testing {
namespace {

constexpr std::uint64_t kRailPiece = 4096;
constexpr std::uint32_t kSlots = 64;

transport::Hello of_path(std::uint16_t path) {
  transport::Hello hello;
  hello.path = path;
  return hello;
}

class WorkerLoopRailsTest : public ::testing::Test {
 protected:
  WorkerLoopRailsTest() {
    transport.rails = 2;
    server = &worker_loop.add_server(0, 1, "server", transport);
    first.rails = {.here = 0, .there = 1, .speed = 10'000};
    second.rails = {.here = 1, .there = 0, .speed = 30'000};
    worker_loop.open(*server, &control, {&first, &second});
  }

  void grant(std::uint32_t slots) {
    tensor::Credits credits;
    for (std::uint32_t i = 0; i < slots; ++i) {
      credits.slots.push_back({tensor::SlotNumber(i), 1000 + i, i * 0x10000ULL, 2 * kRailPiece});
      credits.other_keys.push_back(2000 + i);
    }
    server->on_message(control, encode(credits, 1));
  }
  std::shared_ptr<Operation> submit(std::uint32_t pieces) {
    const std::uint64_t bytes = kRailPiece * pieces;
    memory.resize(bytes);
    auto tensor = std::make_shared<Tensor>(tensor::Partitioning(bytes, 1, kRailPiece),
                                           tensor::Partitioning(bytes, 1, kRailPiece));
    tensor->name = "tensor";
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    tensor->dtype = Dtype::kUint8;
    tensor->bytes = bytes;
    tensor->plans.whole.resize(1);
    for (std::uint32_t i = 0; i < pieces; ++i) tensor->plans.whole[0].push_back({i});
    Request request;
    request.input = request.output = memory.data();
    request.input_allocation = request.output_allocation = {memory, 1};
    auto operation = std::make_shared<Operation>(tensor, request, 0, 0, 1, 1);
    worker_loop.submit(operation, true);
    worker_loop.step();
    return operation;
  }
  static std::uint64_t answer_key(const Bytes& bytes) {
    tensor::PushHeader header{};
    std::memcpy(&header, bytes.data(), sizeof header);
    return header.answer_key;
  }

  server::FakeTransport transport;
  server::FakeControl control{transport::Hello{}};
  server::FakeData first{transport::Hello{}};
  server::FakeData second{transport::Hello{}};
  server::FakeControl controls[2] = {server::FakeControl(transport::Hello{}), server::FakeControl(transport::Hello{})};
  server::FakeData path_one{of_path(1)};
  server::FakeData path_two{of_path(2)};
  transport::Reactor reactor{"test", transport::Spin{}};
  std::vector<std::byte> memory;
  WorkerLoop worker_loop{
      WorkerLoopOptions{.index = 0, .places = 1, .largest_partition = kRailPiece, .staging_bytes = 1 << 20}, reactor};
  ServerConnection* server = nullptr;
};

TEST_F(WorkerLoopRailsTest, EachWriteHasTheKeysOfItsRails) {
  grant(kSlots);
  const auto operation = submit(kSlots);
  ASSERT_EQ(first.writes.size() + second.writes.size(), kSlots);
  ASSERT_FALSE(first.writes.empty());
  ASSERT_FALSE(second.writes.empty());
  for (const transport::WriteOp& op : first.writes) {
    EXPECT_EQ(op.target.key, 2000 + op.immediate) << "of the server's second rail, by which it comes in";
  }
  for (const transport::WriteOp& op : second.writes) EXPECT_EQ(op.target.key, 1000 + op.immediate);
  // The answer comes by the same connection.
  for (const Bytes& header : first.headers) EXPECT_EQ(answer_key(header), 0U);
  for (const Bytes& header : second.headers) EXPECT_EQ(answer_key(header), 1U);
}

TEST_F(WorkerLoopRailsTest, TheFasterRailTakesMore) {
  grant(kSlots);
  const auto operation = submit(kSlots);
  EXPECT_NEAR(static_cast<double>(second.writes.size()), 3.0 * kSlots / 4, 16) << "in batches of 16";
}

TEST_F(WorkerLoopRailsTest, ARailWithoutRoomHoldsNothingUp) {
  first.room = 0;
  grant(kSlots);
  const auto operation = submit(kSlots);
  EXPECT_EQ(second.writes.size(), kSlots);
}

TEST_F(WorkerLoopRailsTest, KeysOfAnotherNumberOfRailsAreNotBelieved) {
  grant(1);
  tensor::Credits credits;
  credits.slots.push_back({tensor::SlotNumber(5), 1, 2, 2 * kRailPiece});
  credits.other_keys = {7, 8};
  server->on_message(control, encode(credits, 1));
  EXPECT_EQ(server->slots.key({tensor::SlotNumber(5), 1, 2, 3}, 2), 1U);
  EXPECT_EQ(server->slots.key({tensor::SlotNumber(0), 1, 2, 3}, 1), 2000U);
  EXPECT_EQ(reactor.counters().stale.get(), 1U);
}

// The memory that it was for holds no result then, or only a part of one.
TEST_F(WorkerLoopRailsTest, AnAnswerOfAnotherLengthIsTheLossOfItsServer) {
  grant(1);
  const auto operation = submit(1);
  const bool by_first = !first.headers.empty();
  tensor::PushHeader header{};
  std::memcpy(&header, (by_first ? first : second).headers.at(0).data(), sizeof header);
  server->on_write(by_first ? first : second, header.immediate, 0);
  ASSERT_TRUE(operation->is_done());
  ASSERT_TRUE(operation->failure().has_value());
  EXPECT_EQ(operation->failure()->code(), ErrorCode::kPeerLost);
  EXPECT_NE(std::string(operation->failure()->what()).find("an answer of 0 bytes instead of 4096"), std::string::npos)
      << operation->failure()->what();
}

// Where no bytes were sent there is no place for an answer either: a staged partition has no buffer.
TEST_F(WorkerLoopRailsTest, WhatWasNeverSentCannotBeAnswered) {
  const auto operation = submit(1);
  ASSERT_TRUE(first.writes.empty() && second.writes.empty()) << "no slot is granted";
  worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  const auto cancels = control.sent<tensor::Cancel>();
  ASSERT_EQ(cancels.size(), 1U);
  const std::uint32_t immediate = cancels[0].partitions.at(0).immediate;
  const transport::RemoteSpan where{0, 0, kRailPiece};
  EXPECT_EQ(server->allows_write(first, where, immediate), 0U);
  server->on_write(first, immediate, 0);
  EXPECT_FALSE(operation->is_done());
  EXPECT_EQ(reactor.counters().stale.get(), 1U);
  server->on_message(control, encode(tensor::Cancelled{{immediate}, {}, {}}, 1));
  EXPECT_TRUE(operation->is_done());
}

// A server that has many small slots free announces none of them for a while, and the loop remembers the pushes that
// filled them. Names of partitions come again after 256.
TEST_F(WorkerLoopRailsTest, AClosedPathEndsOnlyPushesThatWentOutByIt) {
  server->open({{.id = 1, .control = &controls[0], .data = {&path_one}},
                {.id = 2, .pair = 1, .control = &controls[1], .data = {&path_two}}});
  first.room = second.room = 0;
  const auto push = [&](server::FakeData& by) {
    (&by == &path_one ? path_two : path_one).room = 0;
    by.room = 1;
    return submit(1);
  };
  const auto immediate_of = [](const server::FakeData& of) {
    tensor::PushHeader header{};
    std::memcpy(&header, of.headers.back().data(), sizeof header);
    return header.immediate;
  };
  grant(1);
  std::shared_ptr<Operation> operation = push(path_two);
  const std::uint32_t old = immediate_of(path_two);
  server->on_write(path_two, old, kRailPiece);
  ASSERT_TRUE(operation->is_done());
  const auto grant_another = [&] {
    tensor::Credits credits{{{tensor::SlotNumber(1), 1001, 0x10000, 2 * kRailPiece}}, {2001}};
    server->add_slots(credits);
  };
  for (int i = 0; i < 255; ++i) {
    grant_another();
    operation = push(path_one);
    server->on_write(path_one, immediate_of(path_one), kRailPiece);
    ASSERT_TRUE(operation->is_done());
  }
  grant_another();
  operation = push(path_one);
  ASSERT_EQ(immediate_of(path_one), old);
  worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  worker_loop.step();
  server->on_path_broken(2);
  server->on_message(control, encode(tensor::Cancelled{{old}, {}, {}}, 1));
  EXPECT_FALSE(operation->is_done()) << "the first path still reads the caller's memory";
  server->on_written(path_one, old);
  EXPECT_TRUE(operation->is_done());
}

// A slot that is granted once is free once, whatever a server says of it.
TEST_F(WorkerLoopRailsTest, ASlotThatIsFreeIsNotGrantedAgain) {
  for (int times = 0; times < 3; ++times) grant(2);
  EXPECT_EQ(server->slots.small(), 2U);
  EXPECT_EQ(reactor.counters().stale.get(), 4U);
  const auto operation = submit(4);
  EXPECT_EQ(first.writes.size() + second.writes.size(), 2U);
  grant(2);
  worker_loop.step();
  EXPECT_EQ(first.writes.size() + second.writes.size(), 4U) << "once they were filled they are granted again";
}

}  // namespace
}  // namespace bps::worker::testing
