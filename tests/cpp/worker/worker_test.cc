// SPDX-License-Identifier: Apache-2.0
#include "worker/worker.h"

#include <atomic>
#include <set>
#include <thread>

#include "transport/local/self_transport.h"
#include "van/van_fixture.h"

namespace bps::worker {
namespace {

constexpr std::size_t kSubmissions = 1 << 14;  // that fit into the ring of a loop

// A worker with loops that nobody runs, so that what is handed to them stays where it is.
struct Loops {
  explicit Loops(std::size_t count) {
    WorkerOptions options;
    options.key_map.servers = options.key_map.workers = 1;
    options.cut.partition_bytes = options.cut.min_partition_bytes = 128 << 10;
    worker = std::make_unique<Worker>(options, *job[0].operator->());
    for (std::size_t i = 0; i < count; ++i) {
      WorkerLoopOptions of_loop;
      of_loop.index = i;
      reactors.push_back(std::make_unique<transport::Reactor>("test", transport::Spin{}));
      loops.push_back(std::make_unique<WorkerLoop>(of_loop, *reactors[i]));
      loops[i]->add_server(0, 0, "server", transport);
      worker->add_loop(loops[i].get(), {});
    }
  }
  std::shared_ptr<Tensor> declare(const std::string& name, std::uint64_t elements) {
    const auto float32 = static_cast<std::uint8_t>(Dtype::kFloat32);
    return worker->declarations().declare(std::vector<van::TensorSpec>{{0, name, float32, elements, ""}}).front();
  }
  std::shared_ptr<Operation> start(const std::shared_ptr<Tensor>& tensor) {
    Request request;
    request.timeout_s = 0.02;
    return worker->start(tensor, request);
  }
  // The loops send nothing of it: they have no connections.
  static void withdraw(Operation& operation) {
    operation.fail(ErrorCode::kTimeout, "too late", "");
    for (Portion& portion : operation.portions) portion.cancelled = true;
  }
  // Leaves no room in this loop's ring.
  void fill(std::size_t loop, std::size_t count = 2) {
    const auto tensor = declare("filler", 0);
    Request request;
    const auto operation = std::make_shared<Operation>(tensor, request, 0, 0, count, 1);
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
  Loops two(2);
  const auto empty = two.declare("empty", 0);
  two.fill(1);
  const auto first = two.start(empty);  // its first loop is 0
  EXPECT_TRUE(first->is_failing());
  EXPECT_EQ(first->failure()->code(), ErrorCode::kTimeout);
  EXPECT_FALSE(first->is_over()) << "loop 0 has it still";
  EXPECT_EQ(van::test::thrown_by([&] { (void)two.start(empty); }).code, ErrorCode::kTimeout)
      << "its first loop is 1: nothing was sent";
  EXPECT_EQ(first->remaining, 2U);
  two.reactors[0]->loop().turn(Duration::zero());
  EXPECT_EQ(first->remaining, 1U) << "the share of the loop that never saw it";
  two.loops[0]->step();
  EXPECT_TRUE(first->is_over());
}

// What a start needs was allocated by the first one.
TEST(Worker, APreparedOperationIsUsedAgain) {
  Loops one(1);
  PreparedOperation prepared{one.declare("empty", 0), Request{}, nullptr};
  one.worker->start(prepared, true);
  const std::shared_ptr<Operation> first = prepared.current;
  EXPECT_EQ(van::test::thrown_by([&] { one.worker->start(prepared, true); }).code, ErrorCode::kInvalidArgument);
  one.loops[0]->step();
  EXPECT_TRUE(first->is_done());
  for (std::uint32_t round = 1; round < 200; ++round) {
    one.worker->start(prepared, true);
    EXPECT_EQ(prepared.current, first);
    EXPECT_FALSE(first->is_done());
    EXPECT_EQ(first->round, round);
    EXPECT_FALSE(one.loops[0]->is_idle());
    one.loops[0]->step();
    EXPECT_TRUE(first->is_over());
    EXPECT_TRUE(one.loops[0]->is_idle());
  }
  EXPECT_EQ(first.use_count(), 3) << "here, in `prepared`, and once on the loop's list of deadlines";
}

TEST(Worker, APreparedOperationThatFailedIsNotUsedAgain) {
  Loops one(1);
  PreparedOperation prepared{one.declare("empty", 0), Request{}, nullptr};
  one.worker->start(prepared, true);
  const std::shared_ptr<Operation> failed = prepared.current;
  one.worker->abort(failed, ErrorCode::kTimeout, "too late", "");
  one.loops[0]->step();
  EXPECT_TRUE(failed->is_over());
  one.worker->start(prepared, true);
  EXPECT_NE(prepared.current, failed) << "a loop may be about to cancel it";
  EXPECT_FALSE(prepared.current->is_failing());
  one.loops[0]->step();
  EXPECT_TRUE(prepared.current->is_done());
}

TEST(Worker, APreparedOperationOfSeveralLoopsIsNotUsedAgain) {
  Loops two(2);
  PreparedOperation prepared{two.declare("empty", 0), Request{}, nullptr};
  two.worker->start(prepared, true);
  const std::shared_ptr<Operation> first = prepared.current;
  for (const auto& loop : two.loops) loop->step();
  EXPECT_TRUE(first->is_over());
  two.worker->start(prepared, true);
  EXPECT_NE(prepared.current, first);
}

TEST(Worker, WhatIsOnePartitionsGoesToItsLoopAlone) {
  std::set<std::size_t> found;
  for (std::size_t tensor = 0; tensor < 4; ++tensor) {
    Loops two(2);
    std::vector<std::shared_ptr<Tensor>> tensors;
    for (const char* name : {"a", "b", "c", "d"}) tensors.push_back(two.declare(name, 25000));  // no small ones
    const auto operation = two.start(tensors[tensor]);
    const std::size_t loop = operation->loop;
    ASSERT_LT(loop, 2U);
    found.insert(loop);
    EXPECT_EQ(operation->completion.progress, two.reactors[loop]->progress());
    EXPECT_FALSE(two.loops[loop]->is_idle());
    EXPECT_TRUE(two.loops[1 - loop]->is_idle()) << "it hears nothing of it";
    Loops::withdraw(*operation);
  }
  EXPECT_EQ(found.size(), 2U) << "all tensors belong to one loop";
}

TEST(Worker, WhatHasPartitionsOfSeveralLoopsGoesToEach) {
  Loops two(2);
  const auto operation = two.start(two.declare("large", 100000));  // four partitions
  EXPECT_EQ(operation->loop, Operation::kSeveral);
  for (const auto& loop : two.loops) EXPECT_FALSE(loop->is_idle());
  Loops::withdraw(*operation);
}

TEST(Worker, LoopsKnowWhetherWhatWasStartedHasEnded) {
  Loops two(2);
  const auto empty = two.declare("empty", 0);
  const auto end = [&] {
    for (const auto& loop : two.loops) loop->step();
  };
  (void)two.start(empty);
  end();
  WorkerLoops since;
  for (const auto& loop : two.loops) since.add(loop.get());
  EXPECT_TRUE(since.have_ended(0));
  (void)two.start(empty);
  EXPECT_FALSE(since.have_ended(1));
  end();
  EXPECT_TRUE(since.have_ended(1));
  EXPECT_FALSE(since.have_ended(2));
}

TEST(Worker, APreparedOperationThatNoLoopTakesCanBeStartedLater) {
  Loops one(1);
  Request request;
  request.timeout_s = 0.02;
  PreparedOperation prepared{one.declare("empty", 0), request, nullptr};
  one.worker->start(prepared, true);
  one.loops[0]->step();
  one.fill(0, 1);
  EXPECT_EQ(van::test::thrown_by([&] { one.worker->start(prepared, true); }).code, ErrorCode::kTimeout);
  one.loops[0]->step();
  one.reactors[0]->loop().turn(Duration::zero());
  EXPECT_TRUE(one.loops[0]->is_idle()) << "or the end of the job would wait for it";
  one.worker->start(prepared, true);
  one.loops[0]->step();
  EXPECT_TRUE(prepared.current->is_done());
}

// The van's thread tells the loops while the program's takes down what its view has left. To copy so long a text takes
// a while.
TEST(Worker, WhoTakesDownAViewWaitsUntilItsLoopsHaveBeenToldOfTheEnd) {
  const Error why = van::view_ended_error(std::string(std::size_t{4} << 20, 'x'));
  for (int round = 0; round < 3; ++round) {
    Loops two(2);
    for (const auto& reactor : two.reactors) reactor->start();
    const auto operation = two.start(two.declare("empty", 0));
    std::atomic<bool> begins{false};
    std::thread van([&] {
      begins = true;
      two.worker->news().end_view(why);
    });
    while (!begins) std::this_thread::yield();
    two.worker->news().end_view(van::view_ended_error());
    (void)two.worker->end_operations(ErrorCode::kNotInitialized, "shut down", "none", Deadline::after(0));
    van.join();
    for (const auto& reactor : two.reactors) reactor->stop();
    if (const auto failure = operation->failure()) {
      EXPECT_EQ(failure->code(), ErrorCode::kRoundAborted) << "the next view would not go on with it";
    }
  }
}

}  // namespace
}  // namespace bps::worker
