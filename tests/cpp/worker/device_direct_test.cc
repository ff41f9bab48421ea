// SPDX-License-Identifier: Apache-2.0
// Arrays of a GPU that the transport reads and writes itself: when they are sent, from where, and to where. The test
// plays the server, and on the fake driver the processor faults where it touches them.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "device/fake_device.h"
#include "server/fake_transport.h"
#include "worker/worker_loop.h"

namespace bps::worker::testing {
namespace {

using device::testing::only_device;

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint32_t kBlocks = 5;
constexpr std::size_t kArray = kBlock * kBlocks;

class DeviceDirectTest : public ::testing::Test {
 protected:
  DeviceDirectTest() {
    transport.by_address = true;
    transport.takes_foreign_memory = true;
    server = &worker_loop.add_server(0, 1, "server", transport);
    control.sink = server;
    data.sink = server;
    worker_loop.open(*server, &control, {&data});
    grant(*server, control);
    other = &worker_loop.add_server(1, 2, "other server", transport);
    worker_loop.open(*other, &other_control, {&other_data});
  }
  static void grant(ServerConnection& by, server::FakeControl& over) {
    tensor::Credits credits;
    for (std::uint32_t i = 0; i < 2 * kBlocks; ++i) {
      credits.slots.push_back({tensor::SlotNumber(i), 1, std::uint64_t{i} << 20, 2 * kBlock});
    }
    by.on_message(over, encode(credits, 1));
  }
  ~DeviceDirectTest() override {
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);  // no stream ends before its kernels
    FAKE(fake_free)(array);
  }

  // Sums the array in place, behind a kernel that waits for the gate. The other server gets so many blocks of it.
  std::shared_ptr<Operation> submit(tensor::OperationKind kind = tensor::OperationKind::kPushPull,
                                    std::uint32_t elsewhere = 0) {
    FAKE(fake_kernel)(stream.get(), array, 5, kArray, &gate);
    const tensor::Partitioning cut(kArray, 1, kBlock);
    auto tensor = std::make_shared<Tensor>(cut, cut);
    tensor->name = "tensor";
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    tensor->dtype = Dtype::kUint8;
    tensor->bytes = kArray;
    tensor->plans.whole.resize(2);
    for (std::uint32_t i = 0; i < kBlocks; ++i) tensor->plans.whole[i < elsewhere ? 1 : 0].push_back({i});
    Request request;
    request.kind = kind;
    request.input = request.output = array;
    request.input_allocation = request.output_allocation = {{array, kArray}, 0};
    auto operation = std::make_shared<Operation>(tensor, request, 0, sequence++, 1, 2);
    operation->on_device = std::make_unique<DeviceArrays>(only_device());
    operation->on_device->ready[0] = only_device().record(stream.number());
    worker_loop.submit(operation, true);
    return operation;
  }
  template <typename F>
  void turn_until(F is_over) {
    for (const Deadline until = Deadline::after(60); !is_over();) {
      worker_loop.step();
      reactor.loop().turn(Duration::zero());
      ASSERT_FALSE(until.passed());
    }
  }
  void turn() {
    for (int i = 0; i < 100; ++i) worker_loop.step();
  }
  void open_gate() {
    __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
    turn_until([] { return FAKE(fake_busy)() == 0; });
  }
  static tensor::PushHeader header_of(const Bytes& bytes) { return *codec::decode_front<tensor::PushHeader>(bytes); }

  std::byte* const array = static_cast<std::byte*>(FAKE(fake_allocate)(kArray));
  std::uint32_t gate = 0;
  const device::testing::CallersStream stream;
  server::FakeTransport transport;
  server::FakeControl control{transport::Hello{}};
  server::FakeData data{transport::Hello{}};
  server::FakeControl other_control{transport::Hello{}};
  server::FakeData other_data{transport::Hello{}};
  transport::Reactor reactor{"test", transport::Spin{}};
  WorkerLoop worker_loop{
      WorkerLoopOptions{
          .index = 0, .places = 2, .largest_partition = kBlock, .staging_bytes = 64 * kBlock, .gpudirect = true},
      reactor};
  ServerConnection* server = nullptr;
  ServerConnection* other = nullptr;  // it has granted no slots
  std::uint64_t sequence = 0;
};

TEST_F(DeviceDirectTest, IsSentFromTheArrayOnceTheDeviceHasReachedTheCall) {
  const auto operation = submit();
  turn();
  EXPECT_TRUE(data.writes.empty());
  const auto open = worker_loop.list_open(10);
  ASSERT_EQ(open.size(), kBlocks);
  EXPECT_EQ(open[0].waits, OpenPartition::Waits::kForDevice);
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks; });
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    const transport::WriteOp& op = data.writes[i];
    EXPECT_EQ(op.source->bytes().data() + op.source_offset, array + i * kBlock);
    EXPECT_EQ(op.length, kBlock);
    EXPECT_EQ(header_of(data.headers[i]).answer_address, reinterpret_cast<std::uint64_t>(array) + i * kBlock);
  }
}

TEST_F(DeviceDirectTest, IsTracedFromTheCallOn) {
  TraceRing ring({});
  reactor.counters().trace = &ring;
  const auto stages = [&] {
    std::vector<TraceStage> all;
    for (const auto part : ring.noted()) {
      for (const TraceEvent& event : part) all.push_back(event.stage);
    }
    ring.free(all.size());
    return all;
  };
  const auto operation = submit();
  turn();
  EXPECT_EQ(stages(), std::vector<TraceStage>(kBlocks, TraceStage::kOnDevice));
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks; });
  const auto after = stages();
  ASSERT_EQ(after.size(), 2U * kBlocks);
  EXPECT_EQ(after.front(), TraceStage::kQueued);
  EXPECT_EQ(after.back(), TraceStage::kSent);
  reactor.counters().trace = nullptr;
}

TEST_F(DeviceDirectTest, EndsOnceTheDeviceSeesTheAnswers) {
  const auto operation = submit();
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks; });
  const int before = FAKE(fake_flushes)();
  for (const Bytes& header : data.headers) {
    EXPECT_FALSE(operation->is_done());
    EXPECT_EQ(FAKE(fake_flushes)(), before);
    server->on_write(data, header_of(header).immediate, kBlock);
  }
  EXPECT_TRUE(operation->is_done());
  EXPECT_FALSE(operation->failure().has_value());
  EXPECT_EQ(FAKE(fake_flushes)(), before + 1) << "once for all of them";
  EXPECT_EQ(reactor.counters().device_bytes.get(), 0U);
  EXPECT_EQ(reactor.counters().copies.get(), 0U);
}

TEST_F(DeviceDirectTest, FailsWhereTheDeviceMayNotSeeTheAnswers) {
  const auto operation = submit();
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks; });
  FAKE(fake_refuse)("cuFlushGPUDirectRDMAWrites", 999, 0);
  for (const Bytes& header : data.headers) server->on_write(data, header_of(header).immediate, kBlock);
  ASSERT_TRUE(operation->is_done());
  ASSERT_TRUE(operation->failure().has_value());
  EXPECT_EQ(operation->failure()->code(), ErrorCode::kTransport);
}

// What is still to be sent to another server goes its way: nobody cancels it.
TEST_F(DeviceDirectTest, FailsWhenAllOfItIsOver) {
  const auto operation = submit(tensor::OperationKind::kPushPull, 1);
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks - 1; });
  FAKE(fake_refuse)("cuFlushGPUDirectRDMAWrites", 999, 0);
  for (const Bytes& header : data.headers) server->on_write(data, header_of(header).immediate, kBlock);
  EXPECT_FALSE(operation->completion.is_failing());
  grant(*other, other_control);
  turn_until([&] { return other_data.writes.size() == 1; });
  other->on_write(other_data, header_of(other_data.headers[0]).immediate, kBlock);
  ASSERT_TRUE(operation->is_done());
  ASSERT_TRUE(operation->failure().has_value());
  EXPECT_EQ(operation->failure()->code(), ErrorCode::kTransport);
}

TEST_F(DeviceDirectTest, IsNeverSentWhereItWasAbortedBefore) {
  const auto operation = submit();
  turn();
  worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  const auto cancels = control.sent<tensor::Cancel>();
  ASSERT_EQ(cancels.size(), 1U);
  std::vector<std::uint32_t> immediates;
  for (const auto& one : cancels[0].partitions) immediates.push_back(one.immediate);
  EXPECT_EQ(immediates.size(), kBlocks);
  server->on_message(control, encode(tensor::Cancelled{immediates, {}, {}}, 1));
  EXPECT_TRUE(operation->is_done()) << "a late kernel holds up no error";
  open_gate();
  turn();
  EXPECT_TRUE(data.writes.empty());
}

TEST_F(DeviceDirectTest, EndsWithItsServer) {
  const auto operation = submit();
  turn();
  worker_loop.lose_server(1, "gone");
  EXPECT_TRUE(operation->is_done());
  ASSERT_TRUE(operation->failure().has_value());
  EXPECT_EQ(operation->failure()->code(), ErrorCode::kPeerLost);
  open_gate();
  turn();
  EXPECT_TRUE(data.writes.empty());
}

TEST_F(DeviceDirectTest, IsNeverSentWhereTheDriverRefusesToOrderIt) {
  const auto first = submit();  // makes the stream
  turn();
  const auto operation = submit();
  FAKE(fake_refuse)("cuStreamWaitEvent", 900, 0);
  turn_until([&] { return operation->is_failing(); });
  EXPECT_EQ(operation->failure()->code(), ErrorCode::kInvalidArgument) << "it is the error of a capture";
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks; });
  turn();
  EXPECT_EQ(data.writes.size(), kBlocks) << "those of the first operation";
  EXPECT_FALSE(first->is_failing());
}

TEST_F(DeviceDirectTest, IsStagedWhereTheTransportCannotRegisterIt) {
  transport.takes_foreign_memory = false;
  const auto operation = submit();
  open_gate();
  turn_until([&] { return data.writes.size() == kBlocks; });
  for (const transport::WriteOp& op : data.writes) EXPECT_NE(op.source->bytes().data(), array);
  EXPECT_EQ(reactor.counters().device_bytes.get(), kArray);
}

}  // namespace
}  // namespace bps::worker::testing
