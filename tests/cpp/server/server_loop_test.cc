// SPDX-License-Identifier: Apache-2.0
// A server loop: which connections it accepts, how many slots it grants, and what a lost worker leaves behind.
#include <algorithm>

#include "server/server_loop_fixture.h"

namespace bps::server {
namespace {

TEST_F(ServerLoopTest, NobodyTakesThePlaceOfAWorkerThatIsThere) {
  attach(0, 4000);
  FakeWorker impostor;
  connect_control(*server_loop, 1, impostor);
  EXPECT_EQ(impostor.control->send(Bytes(1)), Status::kPeerLost) << "rejected";
  impostor.data = transport.attach(transport.connect_data(request(1)), impostor);
  server_loop->accept(transport.incoming(), &transport);
  const transport::WriteOp op{.immediate = 1};
  EXPECT_EQ(impostor.data->write({&op, 1}), 0U) << "rejected";
  transport.close(impostor.control);
  transport.close(impostor.data);
  for (std::uint32_t i = 0; i < kWorkers; ++i) push(i, header(i));
  expect_sum(6);
}

TEST_F(ServerLoopTest, AWorkerThatIsLostDoesNotComeBack) {
  server_loop->lose_node(1, "worker 0 is lost: for a test");
  settle();
  FakeWorker again;
  connect_control(*server_loop, 1, again);
  EXPECT_EQ(again.control->send(Bytes(1)), Status::kPeerLost) << "or each connection would have a share of its own";
  transport.close(again.control);
}

TEST_F(ServerLoopTest, ManyWorkersShareTheMemoryForSlots) {
  const std::uint64_t payload = 100'000;
  const auto granted = [&](std::uint64_t memory) {
    ServerLoop one(ServerLoopOptions{.window = 8, .slot_memory = memory, .largest_partition = 1 << 20},
                   van::members_with_one_loop(kWorkers), {&transport}, counters);
    FakeWorker worker;
    connect_control(one, 1, worker);
    EXPECT_EQ(worker.control->send(encode(tensor::Attach{payload, true}, 1)), Status::kOk);
    for (int i = 0; i < 6; ++i) {
      transport.poll();
      one.step();
    }
    const auto small =
        std::ranges::count_if(worker.slots, [](const auto& s) { return tensor::is_small_slot(s.capacity); });
    const auto large = static_cast<std::ptrdiff_t>(worker.slots.size()) - small;
    transport.close(worker.control);  // the other end goes with the transport and hears nothing more
    return std::pair(large, small);
  };
  EXPECT_EQ(granted(0), std::pair(std::ptrdiff_t{8}, std::ptrdiff_t{128}));
  EXPECT_EQ(granted(1 << 30), std::pair(std::ptrdiff_t{8}, std::ptrdiff_t{128}));
  EXPECT_EQ(granted(kWorkers * 400'000), std::pair(std::ptrdiff_t{3}, std::ptrdiff_t{8}));
  EXPECT_EQ(granted(1), std::pair(std::ptrdiff_t{1}, std::ptrdiff_t{8})) << "nobody is left without";
}

TEST_F(ServerLoopTest, AWorkerWithFreeSlotsGetsNoMoreOfThem) {
  for (std::uint32_t i = 0; i < 2; ++i) attach(i, 4000);  // pieces so short that all their slots are small ones
  for (std::uint32_t round = 0; round < 20; ++round) push_into_slot(0, header(0, round));
  EXPECT_EQ(counters.overflow_slots.get(), 0U);
  EXPECT_EQ(workers[1].slots.size(), kWindow + kSmallSlots);
}

TEST_F(ServerLoopTest, ALostWorkerFailsItsRounds) {
  push(0, header(0));
  push(1, header(1));
  server_loop->lose_node(3, "worker 2 is lost: for a test");
  settle();
  ASSERT_EQ(workers[0].failures.size(), 1U);
  EXPECT_EQ(workers[0].failures[0].code, ErrorCode::kPeerLost);
  EXPECT_EQ(workers[0].failures[0].what, "worker 2 is lost: for a test");
  EXPECT_EQ(workers[1].failures.size(), 1U);
  EXPECT_EQ(server_loop->open_rounds(), 0U);
  tensor::PushHeader h = header(0, 1);
  push(0, h);
  EXPECT_EQ(server_loop->open_rounds(), 0U) << "a group without its third member opens nothing";
  EXPECT_EQ(workers[0].failures.size(), 2U);
}

}  // namespace
}  // namespace bps::server
