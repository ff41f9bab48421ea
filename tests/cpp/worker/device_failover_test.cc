// SPDX-License-Identifier: Apache-2.0
// Operations in two phases on a GPU's memory, on the fake driver: when results go to the array, and what the end of a
// view leaves of them. The test plays the servers.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "device/fake_device.h"
#include "server/fake_transport.h"
#include "worker/device_route.h"

namespace bps::worker::testing {
namespace {

using device::testing::only_device;

constexpr std::uint64_t kPart = 4096;
constexpr std::uint32_t kParts = 5;
constexpr std::size_t kWhole = kPart * kParts;

std::vector<std::byte> part_of(int value, std::size_t size = kPart) {
  return std::vector<std::byte>(size, static_cast<std::byte>(value));
}

class DeviceFailoverTest : public ::testing::Test {
 protected:
  DeviceFailoverTest() {
    FAKE(fake_delay)(200);
    transport.by_address = true;
    for (std::size_t i = 0; i < kServers; ++i) {
      One& one = servers[i];
      one.server = &worker_loop.add_server(i, static_cast<std::uint32_t>(i + 1), "server", transport);
      one.control.sink = one.server;
      one.data.sink = one.server;
      worker_loop.open(*one.server, &one.control, {&one.data});
      tensor::Credits credits;
      for (std::uint32_t slot = 0; slot < 2 * kParts; ++slot) {
        credits.slots.push_back({tensor::SlotNumber(slot), 1, std::uint64_t{slot} << 20, 2 * kPart});
      }
      one.server->on_message(one.control, encode(credits, 1));
    }
    input.fill(5);
    output.fill(0);
  }

  static constexpr std::size_t kServers = 2;
  struct One {
    ServerConnection* server = nullptr;
    server::FakeControl control{transport::Hello{}};
    server::FakeData data{transport::Hello{}};
  };
  // All partitions go to the server at this place.
  std::shared_ptr<Tensor> declare(std::size_t place) {
    const tensor::Partitioning cut(kWhole, 1, kPart);
    auto tensor = std::make_shared<Tensor>(cut, cut);
    tensor->name = "tensor";
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    tensor->dtype = Dtype::kUint8;
    tensor->bytes = kWhole;
    tensor->plans.whole.resize(kServers);
    for (std::uint32_t i = 0; i < kParts; ++i) tensor->plans.whole[place].push_back({i});
    tensor->plans.sharded = tensor->plans.whole;
    return tensor;
  }
  std::shared_ptr<Operation> submit(tensor::OperationKind kind = tensor::OperationKind::kPushPull,
                                    std::size_t place = 0, std::span<const Begun> only = {}) {
    Request request;
    request.kind = kind;
    request.survives_servers = true;
    request.input = input.data();
    request.output = output.data();
    request.input_allocation = {{input.data(), kWhole}, 0};
    request.output_allocation = {{output.data(), kWhole}, 0};
    auto operation = std::make_shared<Operation>(declare(place), request, 0, sequence++, 1, kServers, only);
    operation->on_device = std::make_unique<DeviceArrays>(only_device());
    operation->on_device->ready[0] = only_device().record(stream.number());
    worker_loop.submit(operation, true);
    return operation;
  }
  template <typename F>
  void turn_until(F is_over) {
    for (const Deadline until = Deadline::after(kPatience_s); !is_over();) {
      worker_loop.step();
      reactor.loop().turn(Duration::zero());
      ASSERT_FALSE(until.passed());
    }
  }
  void await_pushes(std::size_t count, std::size_t place = 0) {
    turn_until([&] { return servers[place].data.headers.size() == count; });
  }
  tensor::PushHeader header_of(std::uint32_t partition, std::size_t place = 0) const {
    for (const Bytes& bytes : servers[place].data.headers) {
      const auto header = *codec::decode_front<tensor::PushHeader>(bytes);
      if (header.partition == partition) return header;
    }
    return {};
  }
  // Writes the answer to where the push wants it.
  void land(std::uint32_t partition, int value, std::size_t place = 0) {
    const tensor::PushHeader header = header_of(partition, place);
    std::memset(reinterpret_cast<void*>(header.answer_address), value, kPart);
    servers[place].server->on_write(servers[place].data, header.immediate, kPart);
  }
  void commit(std::uint32_t partition, std::size_t place = 0) {
    const tensor::Committed committed{{header_of(partition, place).immediate}};
    servers[place].server->on_message(servers[place].control, encode(committed, 1));
  }
  void end_view() { worker_loop.end_view({ErrorCode::kRoundAborted, "a server was lost", "repeat it"}); }
  void end_view_without_server() {
    end_view();
    worker_loop.lose_server(1, "gone");
  }
  std::vector<std::byte> result(std::uint32_t partition) const {
    const auto all = output.read();
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(partition * kPart);
    return {begin, begin + kPart};
  }
  static std::map<std::uint32_t, std::uint64_t> by_partition(const std::vector<Begun>& all) {
    std::map<std::uint32_t, std::uint64_t> found;
    for (const auto& [partition, bytes] : all) found[partition] = bytes;
    return found;
  }

  const device::testing::CallersStream stream;
  OnDevice input{kWhole}, output{kWhole};
  server::FakeTransport transport;
  One servers[kServers];
  transport::Reactor reactor{"test", transport::Spin{}};
  WorkerLoop worker_loop{
      WorkerLoopOptions{
          .index = 0, .places = kServers, .largest_partition = kPart, .staging_bytes = 64 * kPart, .gpudirect = true},
      reactor};
  std::uint64_t sequence = 0;
};

TEST_F(DeviceFailoverTest, AResultGoesToTheArrayOnceTheServerCommitsIt) {
  const auto operation = submit();
  await_pushes(kParts);
  for (std::uint32_t i = 0; i < kParts; ++i) land(i, 10 + static_cast<int>(i));
  for (int i = 0; i < 100; ++i) worker_loop.step();
  EXPECT_EQ(output.read(), part_of(0, kWhole));
  EXPECT_EQ(servers[0].control.sent<tensor::Landed>().size(), 1U);
  for (std::uint32_t i = 0; i < kParts; ++i) commit(i);
  turn_until([&] { return operation->is_done(); });
  EXPECT_FALSE(operation->failure());
  for (std::uint32_t i = 0; i < kParts; ++i) EXPECT_EQ(result(i), part_of(10 + static_cast<int>(i)));
  EXPECT_TRUE(output.is_contained());
}

// So that the answers do not replace what they were made of.
TEST_F(DeviceFailoverTest, NoRdmaDeviceUsesTheArray) {
  transport.takes_foreign_memory = true;
  const auto operation = submit();
  await_pushes(kParts);
  for (const transport::WriteOp& op : servers[0].data.writes) {
    const std::byte* const from = op.source->bytes().data() + op.source_offset;
    EXPECT_TRUE(from < input.data() || from >= input.data() + kWhole);
  }
  end_view_without_server();
}

TEST_F(DeviceFailoverTest, WhatHasLandedOutlivesTheView) {
  const auto operation = submit();
  await_pushes(kParts);
  land(0, 10);
  land(3, 13);
  end_view_without_server();
  ASSERT_TRUE(operation->is_done());
  ASSERT_TRUE(operation->is_suspended());
  Suspension& left = operation->suspension();
  EXPECT_EQ(by_partition(left.whole()), (std::map<std::uint32_t, std::uint64_t>{{0, kPart}, {3, kPart}}));
  EXPECT_EQ(by_partition(left.missing()), (std::map<std::uint32_t, std::uint64_t>{{1, 0}, {2, 0}, {4, 0}}));
  EXPECT_EQ(output.read(), part_of(0, kWhole));
  std::vector<std::byte> read(kPart);
  left.read(3, read);
  EXPECT_EQ(read, part_of(13));
  left.take_landed();
  EXPECT_EQ(result(0), part_of(10));
  EXPECT_EQ(result(1), part_of(0));
  EXPECT_EQ(result(3), part_of(13));
  EXPECT_TRUE(output.is_contained());
}

TEST_F(DeviceFailoverTest, ACopyToTheArrayEndsBeforeTheOperation) {
  const auto operation = submit();
  await_pushes(kParts);
  land(0, 10);
  FAKE(fake_hang)(1);
  commit(0);
  end_view_without_server();
  for (int i = 0; i < 100; ++i) worker_loop.step();
  EXPECT_FALSE(operation->is_done()) << "the device still writes to the array";
  FAKE(fake_hang)(0);
  turn_until([&] { return operation->is_done(); });
  ASSERT_TRUE(operation->is_suspended());
  EXPECT_EQ(result(0), part_of(10));
  EXPECT_EQ(by_partition(operation->suspension().missing()).count(0), 0U) << "it is complete";
  EXPECT_EQ(by_partition(operation->suspension().whole()).count(0), 0U);
}

// The array may have a part of the result then, and is no input any more.
TEST_F(DeviceFailoverTest, AResultWhoseCopyIsRefusedIsStillThere) {
  const auto operation = submit();
  await_pushes(kParts);
  land(0, 10);
  end_view();
  FAKE(fake_refuse)("cuStreamWriteValue32_v2", 900, 0);
  commit(0);
  worker_loop.lose_server(1, "gone");
  turn_until([&] { return operation->is_done(); });
  ASSERT_TRUE(operation->is_suspended());
  EXPECT_EQ(by_partition(operation->suspension().whole()), (std::map<std::uint32_t, std::uint64_t>{{0, kPart}}));
  output.fill(0);
  operation->suspension().take_landed();
  EXPECT_EQ(result(0), part_of(10));
}

TEST_F(DeviceFailoverTest, WhatOthersGiveGoesToTheArrayAndStays) {
  constexpr std::size_t kGiven = 1000;
  const auto before = submit();
  await_pushes(kParts);
  end_view_without_server();
  ASSERT_TRUE(before->is_suspended());
  before->suspension().write(1, part_of(20));
  before->suspension().write(2, part_of(30, kGiven));
  EXPECT_EQ(by_partition(before->suspension().whole()), (std::map<std::uint32_t, std::uint64_t>{{1, kPart}}));
  EXPECT_EQ(by_partition(before->suspension().missing()),
            (std::map<std::uint32_t, std::uint64_t>{{0, 0}, {2, kGiven}, {3, 0}, {4, 0}}));
  std::vector<std::byte> read(kPart);
  before->suspension().read(1, read);
  EXPECT_EQ(read, part_of(20));

  const std::uint32_t again[] = {2, 3};
  const auto operation = submit(tensor::OperationKind::kPushPull, 1, before->suspension().begun(again));
  await_pushes(2, 1);
  land(2, 40, 1);
  land(3, 50, 1);
  commit(2, 1);
  commit(3, 1);
  turn_until([&] { return operation->is_done(); });
  EXPECT_FALSE(operation->failure());
  auto expected = part_of(40);
  std::ranges::copy(part_of(30, kGiven), expected.begin());
  EXPECT_EQ(result(0), part_of(0));
  EXPECT_EQ(result(1), part_of(20));
  EXPECT_EQ(result(2), expected);
  EXPECT_EQ(result(3), part_of(50));
  EXPECT_TRUE(output.is_contained());
}

TEST_F(DeviceFailoverTest, OwnPartsThatLieElsewhereGoToTheResultWithTheCommit) {
  const auto operation = submit(tensor::OperationKind::kAllGather);
  await_pushes(kParts);
  for (std::uint32_t i = 0; i < kParts; ++i) commit(i);
  turn_until([&] { return operation->is_done(); });
  EXPECT_FALSE(operation->failure());
  EXPECT_EQ(output.read(), input.read());
}

// Others may have all that they want, so that nothing is repeated.
TEST_F(DeviceFailoverTest, OwnPartsThatLieElsewhereGoToTheResultInTheNextView) {
  const auto operation = submit(tensor::OperationKind::kAllGather);
  await_pushes(kParts);
  end_view_without_server();
  ASSERT_TRUE(operation->is_suspended());
  EXPECT_TRUE(operation->suspension().missing().empty());
  operation->suspension().take_landed();
  EXPECT_EQ(output.read(), input.read());
}

TEST_F(DeviceFailoverTest, ALateDeviceIsStillWaitedForInTheNextView) {
  std::uint32_t gate = 0;
  FAKE(fake_kernel)(stream.get(), input.data(), 6, kWhole, &gate);
  const auto operation = submit();
  for (int i = 0; i < 100; ++i) worker_loop.step();
  end_view_without_server();
  ASSERT_TRUE(operation->is_suspended());
  EXPECT_EQ(operation->suspension().missing().size(), kParts);
  EXPECT_TRUE(operation->on_device->ready[0]) << "or what continues it would read what kernels still make";
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  turn_until([&] { return !operation->is_copied(); });
}

}  // namespace
}  // namespace bps::worker::testing
