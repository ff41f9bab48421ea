// SPDX-License-Identifier: Apache-2.0
// In two phases: when a worker tells the server that answers have landed.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "server/fake_transport.h"
#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

constexpr std::uint64_t kPiece = 1024;

class LandedTest : public ::testing::Test {
 protected:
  LandedTest() {
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
  std::shared_ptr<Operation> submit() {
    constexpr std::uint32_t kPieces = 3;
    constexpr std::uint64_t kBytes = kPiece * kPieces;
    memory.emplace_back(kBytes);
    const tensor::Partitioning cut(kBytes, 4, kPiece);
    auto tensor = std::make_shared<Tensor>(cut, cut);
    tensor->name = "tensor";
    tensor->id = static_cast<std::uint32_t>(memory.size());
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
    tensor->dtype = Dtype::kFloat32;
    tensor->bytes = kBytes;
    tensor->plans.whole.resize(1);
    for (std::uint32_t i = 0; i < kPieces; ++i) tensor->plans.whole[0].push_back({i});
    Request request;
    request.survives_servers = true;
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
};

TEST_F(LandedTest, AServerIsToldOnceATurn) {
  const auto operation = submit();
  ASSERT_EQ(data.writes.size(), 3U);
  for (const std::size_t which : {0, 1}) server->on_write(data, header_of(which).immediate, kPiece);
  EXPECT_EQ(told(), std::vector<std::size_t>{});
  land(2);
  EXPECT_EQ(told(), std::vector<std::size_t>{3});
}

TEST_F(LandedTest, BeforeACancelTheServerHearsOfWhatHasLanded) {
  const auto operation = submit();
  land(0);
  worker_loop.abort_operations([](const Operation&) { return true; }, ErrorCode::kTimeout, "too late", "");
  ASSERT_EQ(told(), std::vector<std::size_t>{1});
  const auto is_landed = [](const auto& message) { return std::holds_alternative<tensor::Landed>(message); };
  const auto is_cancel = [](const auto& message) { return std::holds_alternative<tensor::Cancel>(message); };
  EXPECT_LT(std::ranges::find_if(control.messages, is_landed), std::ranges::find_if(control.messages, is_cancel));
}

}  // namespace
}  // namespace bps::worker
