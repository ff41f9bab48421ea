// SPDX-License-Identifier: Apache-2.0
// When a process of this host is ended because it could still write: a server that is alive, and that a worker loop
// goes away from.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "server/fake_transport.h"
#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

constexpr std::uint64_t kBytes = 1 << 20;  // travels from and to the caller's memory

struct Ones final : tensor::ContributionSource {
  Status read(std::uint32_t, std::byte* into) override {
    std::memset(into, 1, kBytes);
    return Status::kOk;
  }
  void land(std::uint32_t, const std::byte*) override { events.emplace_back("landed"); }
  void deliver(std::uint32_t, const std::byte*) override { events.emplace_back("delivered"); }
  void fail(std::uint32_t, const Error& why, std::span<const std::uint32_t>) override {
    events.emplace_back(why.what());
  }
  void fail_round(std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const Error&) override {}
  std::vector<std::string> events;
};

class FenceTest : public ::testing::Test {
 protected:
  FenceTest() {
    data.put_on_same_host();
    data.takes_descriptors = true;
    data.fenced = false;
    worker_loop.emplace(
        WorkerLoopOptions{.index = 0, .places = 1, .largest_partition = kBytes, .staging_bytes = 4 * kBytes}, reactor);
    ServerConnection& server = worker_loop->add_server(0, 1, "server", transport);
    control.sink = &server;
    data.sink = &server;
    worker_loop->open(server, &control, {&data});
    worker_loop->relay_for(&sum);
    header.version = transport::kProtocolVersion;
    header.dtype = Dtype::kFloat32;
    header.flags = tensor::kIsPush | tensor::kIsPull | tensor::kHasPayload | tensor::kWantsData;
    header.length = kBytes;
  }
  std::shared_ptr<Operation> submit() {
    auto tensor =
        std::make_shared<Tensor>(tensor::Partitioning(kBytes, 4, kBytes), tensor::Partitioning(kBytes, 4, kBytes));
    tensor->name = "tensor";
    tensor->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    tensor->dtype = Dtype::kFloat32;
    tensor->bytes = kBytes;
    tensor->whole_plan = {{{0}}};
    Request request;
    request.input = request.output = memory.data();
    request.input_allocation = request.output_allocation = {memory, 1};
    auto operation = std::make_shared<Operation>(tensor, request, 0, 0, 1, 1);
    worker_loop->submit(operation, true);
    worker_loop->step();
    return operation;
  }

  server::FakeTransport transport;
  server::FakeControl control{transport::Hello{}};
  server::FakeData data{transport::Hello{}};
  transport::Reactor reactor{"test", transport::Spin{}};
  Ones sum;
  tensor::PushHeader header{};
  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
  std::optional<WorkerLoop> worker_loop;
};

TEST_F(FenceTest, AServerThatReachesACallersMemoryIsEnded) {
  const auto operation = submit();
  ASSERT_EQ(data.posted, 1U);
  worker_loop.reset();
  EXPECT_EQ(data.fences, 1);
  EXPECT_TRUE(operation->over());
}

// It lies in a staging buffer, which nobody uses again.
TEST_F(FenceTest, AServerThatHasTheContributionOfAHostIsLeftAlone) {
  worker_loop->contribute(0, header, 0, 0);
  worker_loop->step();  // makes a buffer
  worker_loop->step();
  ASSERT_EQ(data.posted, 1U);
  worker_loop.reset();
  EXPECT_EQ(data.fences, 0) << "a healthy server of the other ranks";
}

// In two phases, see tensor/host_sum.h.
TEST_F(FenceTest, TheServerHearsOfTheAnswerForAHostWhenItsRanksHaveIt) {
  ServerConnection& server = *dynamic_cast<ServerConnection*>(control.sink);
  header.flags |= tensor::kTwoPhase;
  worker_loop->contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->step();
  ASSERT_EQ(data.posted, 1U);
  worker_loop->on_answer(server, 0);
  worker_loop->step();
  EXPECT_EQ(sum.events, std::vector<std::string>{"landed"});
  EXPECT_TRUE(control.sent<tensor::Landed>().empty());
  worker_loop->note_landed(0);
  worker_loop->step();
  ASSERT_EQ(control.sent<tensor::Landed>().size(), 1U);
  EXPECT_EQ(control.sent<tensor::Landed>()[0].immediates, std::vector<std::uint32_t>{0});
  worker_loop->on_message(server, encode(tensor::Committed{{0}}, 1));
  EXPECT_EQ(sum.events, (std::vector<std::string>{"landed", "delivered"}));
}

TEST_F(FenceTest, TheEndOfTheViewIsNoFailureOfWhatAHostHasContributed) {
  ServerConnection& server = *dynamic_cast<ServerConnection*>(control.sink);
  header.flags |= tensor::kTwoPhase;
  worker_loop->contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->step();
  worker_loop->cancel(0, Error(ErrorCode::kTimeout, "a deadline has passed", ""));
  worker_loop->end_view(Error(ErrorCode::kRoundAborted, "the view has ended", ""));
  data.fenced = true;
  worker_loop->lose_server(server.node, "it has ended");
  EXPECT_EQ(sum.events, std::vector<std::string>{"the view has ended"});
}

TEST_F(FenceTest, AServerThatWasOnlyToldThatAHostWillNotContributeIsLeftAlone) {
  worker_loop->refuse(header, 0, Error(ErrorCode::kRoundAborted, "the view has ended", ""));
  ASSERT_EQ(control.sent<tensor::Cancel>().size(), 1U);
  worker_loop.reset();
  EXPECT_EQ(data.fences, 0) << "it has nothing that it could write to";
}

}  // namespace
}  // namespace bps::worker
