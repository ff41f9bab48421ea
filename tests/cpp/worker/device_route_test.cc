// SPDX-License-Identifier: Apache-2.0
// Operations on a GPU's memory, on the fake driver: sums, late devices, aborts and losses at any moment, refusals,
// failed devices.
#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "worker/device_route.h"

namespace bps::worker::testing {
namespace {

using device::testing::only_device;

TEST_F(DeviceRouteTest, SumsAreThoseOfTheHost) {
  const std::uint64_t before = reactor.counters().device_bytes.get();
  const Sent sent = send(40, group);
  await(sent);
  sent.operation->rethrow();
  EXPECT_EQ(sent.output->read(), sent.input->read());
  EXPECT_TRUE(sent.output->is_contained());
  EXPECT_EQ(reactor.counters().device_bytes.get() - before, 2 * sent.input->size());
  EXPECT_EQ(reactor.counters().copied_bytes.get(), 0U) << "the processor copies nothing";
}

TEST_F(DeviceRouteTest, ALateDeviceHoldsUpNoMemoryOfTheHost) {
  std::uint32_t gate = 0;
  const Sent late = send(4, group, &gate);
  for (int i = 0; i < 50; ++i) turn();
  const auto urgent = submit(4, -1);
  turn_until([&] { return urgent->is_done(); });
  EXPECT_FALSE(late.operation->is_done());
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  await(late);
  EXPECT_EQ(late.output->read(), std::vector<std::byte>(late.output->size(), std::byte{5}));
}

TEST_F(DeviceRouteTest, AReportNamesWhatWaitsForTheDevice) {
  std::uint32_t gate = 0;
  const Sent late = send(4, group, &gate);
  for (int i = 0; i < 5; ++i) turn();
  const auto open = worker_loop.list_open(100);
  EXPECT_EQ(open.size(), 8U) << "each once";
  using Waits = OpenPartition::Waits;
  const auto count = [&](Waits what) { return std::ranges::count(open, what, &OpenPartition::waits); };
  EXPECT_GE(count(Waits::kForDevice), 4) << "there is a buffer for one of the servers at least";
  EXPECT_EQ(count(Waits::kForAnswer), 0);
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  await(late);
}

TEST_F(DeviceRouteTest, ManyAtOnceAndNothingIsMadeForEach) {
  const auto run = [&] {
    std::vector<Sent> all;
    for (std::uint32_t i = 0; i < 20; ++i) all.push_back(send(1 + i % 3, group));
    for (const Sent& one : all) {
      await(one);
      one.operation->rethrow();
      EXPECT_EQ(one.output->read(), one.input->read());
    }
  };
  run();
  const auto made = [] { return std::pair(FAKE(fake_events)(), FAKE(fake_streams)()); };
  const auto before = made();
  for (int i = 0; i < 5; ++i) run();
  EXPECT_EQ(made(), before) << "events, streams";
}

TEST_F(DeviceRouteTest, AnAbortDoesNotWaitForALateDeviceWhichReadsOn) {
  std::uint32_t gate = 0;
  const Sent late = send(2, group, &gate);
  for (int i = 0; i < 20; ++i) turn();
  abort_all();
  await(late);
  EXPECT_THROW(late.operation->rethrow(), Error);
  EXPECT_TRUE(late.operation->is_copied()) << "the memory must stay";
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  turn_until([&] { return !late.operation->is_copied(); });
  EXPECT_EQ(late.output->read(), std::vector<std::byte>(late.output->size(), std::byte{0}));
  const Sent next = send(40, group);
  await(next);
  next.operation->rethrow();
  EXPECT_EQ(next.output->read(), next.input->read());
}

TEST_F(DeviceRouteTest, ASleepingLoopHearsOfACopyBeforeALateOne) {
  std::uint32_t first_gate = 0, second_gate = 0;
  const Sent first = send(1, group, &first_gate);
  const Sent second = send(1, group, &second_gate);
  for (int i = 0; i < 3; ++i) worker_loop.step();
  ASSERT_TRUE(worker_loop.arm());
  std::uint64_t rings = 0;
  [[maybe_unused]] const auto n = ::read(reactor.loop().doorbell(), &rings, sizeof rings);  // of the submissions
  __atomic_store_n(&first_gate, 1, __ATOMIC_RELEASE);
  pollfd bell{reactor.loop().doorbell(), POLLIN, 0};
  EXPECT_EQ(::poll(&bell, 1, static_cast<int>(kPatience_s * 1e3 / 4)), 1) << "the first copies have ended";
  __atomic_store_n(&second_gate, 1, __ATOMIC_RELEASE);
  await(first);
  await(second);
}

// What the driver has taken of a copy goes on, although it refuses to mark its end.
TEST_F(DeviceRouteTest, ARefusedMarkKeepsWhatIsCopiedFromTheDevice) {
  std::uint32_t gate = 0;
  FAKE(fake_refuse)("cuStreamWriteValue32_v2", 900, 0);
  const Sent sent = send(1, group, &gate);
  await(sent);
  const auto why = sent.operation->failure();
  ASSERT_TRUE(why);
  EXPECT_EQ(why->code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(why->what()).find("GPU 0 has refused a copy"), std::string::npos) << why->what();
  EXPECT_NE(why->hint().find("captured into a CUDA graph"), std::string::npos);
  EXPECT_TRUE(sent.operation->is_copied()) << "array and buffer must stay";
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  turn_until([&] { return !sent.operation->is_copied(); });
  const Sent next = send(40, group);
  await(next);
  next.operation->rethrow();
  EXPECT_EQ(next.output->read(), next.input->read());
}

class DeviceRouteRefusal : public DeviceRouteTest, public ::testing::WithParamInterface<std::pair<const char*, int>> {};

TEST_P(DeviceRouteRefusal, OfACopyToTheDeviceFailsItsOperationWhenItHasEnded) {
  FAKE(fake_refuse)(GetParam().first, 900, GetParam().second);
  const Sent sent = send(1, group);
  for (int i = 0; !(sent.operation->is_failing() && sent.operation->is_copied()) && i < 1'000'000; ++i) {
    if (i == 0) FAKE(fake_delay)(20'000);
    turn();
  }
  ASSERT_TRUE(sent.operation->is_failing());
  await(sent);
  EXPECT_THROW(sent.operation->rethrow(), Error) << "not all of the result is there";
  expect_quiet(sent);
  turn_until([&] { return !sent.operation->is_copied(); });  // what was to be sent to the other server, perhaps
  FAKE(fake_delay)(200);
  const Sent next = send(40, group);
  await(next);
  next.operation->rethrow();
  EXPECT_EQ(next.output->read(), next.input->read());
}

// Of marks, those of what is sent come first.
INSTANTIATE_TEST_SUITE_P(Of, DeviceRouteRefusal,
                         ::testing::Values(std::pair("cuMemcpyHtoDAsync_v2", 0),
                                           std::pair("cuStreamWriteValue32_v2", 2)));

TEST_F(DeviceRouteTest, AnArrayIsInUseUntilItsResultIsThere) {
  const Sent sent = send(1, group);
  // Until what is sent is in buffers. The servers rest meanwhile, and no answer comes.
  for (const bool is_copied : {true, false}) {
    for (const Deadline until = Deadline::after(kPatience_s); sent.operation->is_copied() != is_copied;) {
      worker_loop.step();
      ASSERT_FALSE(until.passed());
    }
  }
  FAKE(fake_hang)(1);
  for (int i = 0; i < 20; ++i) turn();
  EXPECT_TRUE(sent.operation->is_copied());
  abort_all();
  for (int i = 0; i < 20; ++i) turn();
  EXPECT_FALSE(sent.operation->is_done()) << "the device writes to it";
  FAKE(fake_hang)(0);
  await(sent);
  EXPECT_FALSE(sent.operation->is_copied());
  expect_quiet(sent);
}

TEST_F(DeviceRouteTest, BuffersThatTheHostMadeArePinnedWhenADeviceTakesThem) {
  const Sent first = send(1, group);
  await(first);
  for (ServerConnection* server : servers) server->memory.add_buffer();
  const int before = FAKE(fake_pinned)();
  servers.front()->memory.add_buffer();
  EXPECT_EQ(FAKE(fake_pinned)(), before) << "no device has taken it";
  const Sent second = send(40, group);
  await(second);
  second.operation->rethrow();
  EXPECT_EQ(second.output->read(), second.input->read());
}

TEST_F(DeviceRouteTest, OwnPartsThatLieElsewhereAreCopiedToTheResult) {
  const auto tensor = declare(20, group);
  tensor->plans.sharded = tensor->plans.whole;
  OnDevice part(tensor->bytes), whole(tensor->bytes);
  std::vector<std::byte> values(tensor->bytes);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i * 7);
  part.write(values);
  Request request;
  request.kind = tensor::OperationKind::kAllGather;
  request.input = part.data();
  request.output = whole.data();
  const auto operation = std::make_shared<Operation>(tensor, request, 0, sequence++, 1, kServers);
  operation->on_device = std::make_unique<DeviceArrays>(only_device());
  worker_loop.submit(operation, true);
  turn_until([&] { return operation->is_done(); });
  operation->rethrow();
  EXPECT_EQ(whole.read(), values);
  EXPECT_TRUE(whole.is_contained());
}

class DeviceRouteEnd : public DeviceRouteTest, public ::testing::WithParamInterface<int> {
 protected:
  Sent begin_sum(const std::shared_ptr<const van::Group>& of) {
    const auto tensor = declare(kPieces, of);
    return begin(GetParam(), tensor, values_of(*tensor));
  }

 public:
  using DeviceRouteTest::kCopies;
};

TEST_P(DeviceRouteEnd, NothingChangesOnceAnAbortedOperationHasEnded) {
  const Sent sent = begin_sum(group);
  expect_quiet_end(sent, [this] { abort_all(); });
}

TEST_P(DeviceRouteEnd, NothingChangesOnceAServerIsLost) {
  const Sent sent = begin_sum(group);
  expect_quiet_end(sent, [this] { worker_loop.lose_server(servers[0]->node, "gone"); });
}

// No partition of another server keeps the operation open meanwhile.
TEST_P(DeviceRouteEnd, NothingChangesOnceAllServersAreLost) {
  const Sent sent = begin_sum(group);
  expect_quiet_end(sent, [this] { lose_all(); });
}
INSTANTIATE_TEST_SUITE_P(AtAnyMoment, DeviceRouteEnd, ::testing::Range(0, DeviceRouteEnd::kCopies, 11));

class DeviceRouteAlone : public DeviceRouteEnd {};

TEST_P(DeviceRouteAlone, NothingChangesOnceAnAbortedOperationHasEnded) {
  const Sent sent = begin_sum(with_silent);
  expect_quiet_end(sent, [this] { abort_all(); });
  EXPECT_EQ(sent.output->read(), std::vector<std::byte>(sent.output->size(), std::byte{0}));
}
INSTANTIATE_TEST_SUITE_P(WhereAnotherRankSaysNothing, DeviceRouteAlone, ::testing::Range(0, 16, 5));

// In a process of its own: a device that has failed stays so.
TEST_F(DeviceRouteTest, ADeviceThatFailsFailsWhatItCopiesFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const std::uint32_t gate = 0;
        const Sent sent = send(8, group, &gate);
        for (int i = 0; i < 20; ++i) turn();
        FAKE(fake_break)();
        for (const Deadline until = Deadline::after(kPatience_s); !sent.operation->is_done() && !until.passed();)
          turn();
        const auto why = sent.operation->failure();
        std::fprintf(stderr, "%s, %u", why ? why->what() : "nothing", sent.operation->on_device->copies.load());
        for (ServerConnection* server : servers) server->memory.add_buffer();  // for operations of the host
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(0), "GPU 0 has failed: an illegal memory access .*, 0");
}

}  // namespace
}  // namespace bps::worker::testing
