// SPDX-License-Identifier: Apache-2.0
#include "worker/worker.h"

#include "transport/local/self_transport.h"
#include "van/van_fixture.h"

namespace bps::worker {
namespace {

constexpr std::size_t kSubmissions = 1 << 14;  // that fit into the ring of a loop

// A worker with two loops that nobody runs, so that what is handed to them stays where it is.
struct TwoLoops {
  TwoLoops() {
    WorkerOptions options;
    options.key_map.servers = options.key_map.workers = 1;
    options.cut.partition_bytes = options.cut.min_partition_bytes = 4096;
    worker = std::make_unique<Worker>(options, *job[0].operator->());
    for (std::size_t i = 0; i < 2; ++i) {
      WorkerLoopOptions of_loop;
      of_loop.index = i;
      reactors.push_back(std::make_unique<transport::Reactor>("test", transport::Spin{}));
      loops.push_back(std::make_unique<WorkerLoop>(of_loop, *reactors[i]));
      loops[i]->add_server(0, 0, "server", transport);
      worker->add_loop(loops[i].get(), reactors[i].get(), {});
    }
  }
  std::shared_ptr<Tensor> declare(const std::string& name, std::uint64_t elements) {
    const auto float32 = static_cast<std::uint8_t>(Dtype::kFloat32);
    return worker->declare(std::vector<van::TensorSpec>{{0, name, float32, elements, ""}}).front();
  }
  std::shared_ptr<Operation> start(const std::shared_ptr<Tensor>& tensor) {
    Request request;
    request.timeout_s = 0.02;
    return worker->start(tensor, request);
  }
  // Leaves no room in this loop's ring.
  void fill(std::size_t loop) {
    const auto tensor = declare("filler", 0);
    Request request;
    const auto operation = std::make_shared<Operation>(tensor, request, 0, 0, 2, 1);
    for (std::size_t i = 0; i < kSubmissions; ++i) loops[loop]->submit(operation, false);
  }

  van::test::JointJob job{1};
  Counters counters;
  transport::local::SelfTransport transport{counters};
  std::vector<std::unique_ptr<transport::Reactor>> reactors;
  std::vector<std::unique_ptr<WorkerLoop>> loops;
  std::unique_ptr<Worker> worker;
};

TEST(Worker, AnOperationThatOneLoopCannotTakeFailsAndEnds) {
  TwoLoops two;
  const auto empty = two.declare("empty", 0);
  two.fill(1);
  const auto first = two.start(empty);  // its first loop is 0
  EXPECT_TRUE(first->is_failing());
  EXPECT_EQ(first->failure()->code(), ErrorCode::kTimeout);
  EXPECT_FALSE(first->over()) << "loop 0 has it still";
  EXPECT_EQ(van::test::thrown_by([&] { (void)two.start(empty); }).code, ErrorCode::kTimeout)
      << "its first loop is 1: nothing was sent";
  EXPECT_EQ(first->remaining, 2U);
  two.reactors[0]->loop().turn(Duration::zero());
  EXPECT_EQ(first->remaining, 1U) << "the share of the loop that never saw it";
  two.loops[0]->step();
  EXPECT_TRUE(first->over());
}

}  // namespace
}  // namespace bps::worker
