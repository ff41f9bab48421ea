// SPDX-License-Identifier: Apache-2.0
// Servers get other weights while all ranks push and pull: no sum lacks a contribution or has one twice, and none waits
// for a partition that others sent elsewhere. Of interest under the thread checker, too.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "eventually.h"
#include "node/process.h"
#include "van/scheduler.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

constexpr std::uint32_t kRanks = 4;
constexpr const char* kSecret = "a secret of the tests, long enough";

std::unique_ptr<Process> start_rank(std::uint32_t rank, std::uint16_t scheduler, const std::string& host) {
  SettingValues values;
  const auto set = [&](const char* name, const std::string& value) { values.set(name, value, "argument"); };
  set("BPS_TIMEOUT", "60");
  set("BPS_JOIN_TIMEOUT", "60");
  set("BPS_TRANSPORT", "shm,tcp");
  set("BPS_SECRET", kSecret);
  set("BPS_HOST_ID", host);
  set("BPS_PARTITION_BYTES", "4096");
  set("BPS_MIN_PARTITION_BYTES", "4096");
  set("BPS_NODE_HOST", "127.0.0.1");
  Startup startup;
  startup.worker_rank = startup.server_rank = static_cast<std::int32_t>(rank);
  startup.workers = startup.servers = kRanks;
  startup.joint = true;
  startup.scheduler_ports = {scheduler};
  startup.job = "job";
  return Process::start(values.parse(), startup);
}

// One rank, with tensors of all ranks and of some, which it starts in an order of its own.
class Rank {
 public:
  Rank(Process& process, std::uint32_t rank) : process_(process), rank_(rank), random_(rank) {
    const bool is_in_some = rank % 2 == 0;
    const van::Group some = !is_in_some ? van::Group{} : process.worker().declarations().new_group({0, 2}, "some", 60);
    for (std::uint32_t i = 0; i < 6; ++i) {
      const bool is_of_some = i % 3 == 2;
      if (is_of_some && !is_in_some) continue;
      Mine& mine = tensors_.emplace_back();
      mine.ranks = is_of_some ? std::vector<std::uint32_t>{0, 2} : std::vector<std::uint32_t>{0, 1, 2, 3};
      mine.memory.resize(20000 + i);
      const van::TensorSpec spec{is_of_some ? some.id : 0, "t" + std::to_string(i),
                                 static_cast<std::uint8_t>(Dtype::kFloat32), mine.memory.size(), ""};
      mine.tensor = process.worker().declarations().declare(std::vector{spec}).front();
      worker::Request request;
      request.input = request.output = reinterpret_cast<std::byte*>(mine.memory.data());
      request.input_allocation =
          request.output_allocation = {std::as_writable_bytes(std::span(mine.memory)), rank * 100 + i + 1};
      mine.request = request;
      if (i % 2 == 0) mine.prepared.emplace(worker::PreparedOperation{mine.tensor, request, nullptr});
    }
    apart_.resize(20000);
    const van::TensorSpec spec{0, "apart", static_cast<std::uint8_t>(Dtype::kFloat32), apart_.size(), ""};
    tensor_apart_ = process.worker().declarations().declare(std::vector{spec}).front();
    driven_.resize(20000);
    const van::TensorSpec with_momentum{
        0, "driven", static_cast<std::uint8_t>(Dtype::kFloat32), driven_.size(), "", "bf16:momentum=0.5"};
    tensor_driven_ = process.worker().declarations().declare(std::vector{with_momentum}).front();
  }

  void step(std::uint32_t number) {
    if (number % kApart == 1) push(number);
    if (number % kApart == kApart / 2) {
      ASSERT_NO_FATAL_FAILURE(pull(number - kApart / 2 + 1));
    }
    ASSERT_NO_FATAL_FAILURE(drive());
    std::vector<Mine*> order;
    for (Mine& mine : tensors_) {
      if (number % 8 == 0 && !mine.prepared) skip_rounds(*mine.tensor);
      for (std::size_t i = 0; i < mine.memory.size(); ++i) mine.memory[i] = value(rank_, i, number);
      order.push_back(&mine);
    }
    std::ranges::shuffle(order, random_);
    std::vector<std::shared_ptr<worker::Operation>> started;
    for (Mine* mine : order) {
      if (mine->prepared) {
        process_.worker().start(*mine->prepared, false);
        started.push_back(mine->prepared->current);
      } else {
        started.push_back(process_.worker().start(mine->tensor, mine->request));
      }
    }
    for (const auto& operation : started) {
      ASSERT_TRUE(operation->wait(Deadline::after(60)));
      operation->rethrow();
      if (operation->plans) latest_ = std::max(latest_, operation->plans->shift);
    }
    for (const Mine& mine : tensors_) {
      for (std::size_t i = 0; i < mine.memory.size(); ++i) {
        float sum = 0;
        for (const std::uint32_t rank : mine.ranks) sum += value(rank, i, number);
        ASSERT_EQ(mine.memory[i], sum) << mine.tensor->name << " step " << number << " element " << i;
      }
    }
  }
  // The latest weights that a round of this rank was placed by.
  std::uint32_t latest() const { return latest_; }

 private:
  // push() and pull() of a round: this many steps from one push to the next.
  static constexpr std::uint32_t kApart = 16;

  struct Mine {
    std::vector<std::uint32_t> ranks;
    std::vector<float> memory;
    std::shared_ptr<worker::Tensor> tensor;
    worker::Request request;
    std::optional<worker::PreparedOperation> prepared;
  };
  static float value(std::uint32_t rank, std::size_t element, std::uint32_t step) {
    return static_cast<float>((rank + 1) * 1000 + element % 97 + step % 31);
  }

  // The halves of a round may be far apart: servers sum it where they have begun.
  void push(std::uint32_t number) {
    for (std::size_t i = 0; i < apart_.size(); ++i) apart_[i] = value(rank_, i, number);
    worker::Request half;
    half.kind = tensor::OperationKind::kSplit;
    half.pulls = false;
    half.input = reinterpret_cast<std::byte*>(apart_.data());
    half.input_allocation = {std::as_writable_bytes(std::span(apart_)), rank_ * 100 + 50};
    pushed_ = process_.worker().start(tensor_apart_, half);
  }
  void pull(std::uint32_t number) {
    std::vector<float> sums(apart_.size());
    worker::Request half;
    half.kind = tensor::OperationKind::kSplit;
    half.pushes = false;
    half.output = reinterpret_cast<std::byte*>(sums.data());
    half.output_allocation = {std::as_writable_bytes(std::span(sums)), 1000 + number};
    std::shared_ptr<worker::Operation> pulled;
    ASSERT_NO_THROW(pulled = process_.worker().start(tensor_apart_, half));
    for (const auto& operation : {pushed_, pulled}) {
      ASSERT_TRUE(operation->wait(Deadline::after(60)));
      operation->rethrow();
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      float sum = 0;
      for (std::uint32_t rank = 0; rank < kRanks; ++rank) sum += value(rank, i, number);
      ASSERT_EQ(sums[i], sum) << "pushed in step " << number << " element " << i;
    }
  }
  // What is always given grows by its momentum: a rank that has forgotten some of that would give less.
  void drive() {
    const std::vector<float> before = std::exchange(driven_, std::vector<float>(driven_.size(), 1));
    worker::Request request;
    request.input = request.output = reinterpret_cast<std::byte*>(driven_.data());
    request.input_allocation =
        request.output_allocation = {std::as_writable_bytes(std::span(driven_)), rank_ * 100 + ++drives_ * 1000};
    const auto operation = process_.worker().start(tensor_driven_, request);
    ASSERT_TRUE(operation->wait(Deadline::after(60)));
    operation->rethrow();
    for (std::size_t i = 0; i < driven_.size(); ++i) ASSERT_GE(driven_[i], before[i]) << i;
    ASSERT_GE(driven_[0], kRanks * 1.5F);
  }
  // As if it had been summed so often elsewhere: a server that gets partitions of it has missed as many rounds.
  static void skip_rounds(worker::Tensor& tensor) {
    tensor.next_round += 100'000;
    tensor.next_pull += 100'000;
  }

  Process& process_;
  const std::uint32_t rank_;
  std::minstd_rand random_;
  std::vector<Mine> tensors_;
  std::vector<float> apart_;
  std::shared_ptr<worker::Tensor> tensor_apart_;
  std::shared_ptr<worker::Operation> pushed_;
  std::vector<float> driven_;
  std::shared_ptr<worker::Tensor> tensor_driven_;
  std::uint32_t drives_ = 0;
  std::uint32_t latest_ = 0;
};

van::Scheduler start_scheduler() {
  return {{.address = "127.0.0.1",
           .ports = {0},
           .workers = kRanks,
           .servers = kRanks,
           .heartbeat_timeout_s = 60,
           .on_lost = nullptr},
          transport::Credentials::from("job", kSecret)};
}

void run_job(const std::vector<std::string>& hosts) {
  van::Scheduler scheduler = start_scheduler();
  std::atomic<std::uint32_t> ready{0};
  std::atomic<std::uint32_t> stop_at{0};                  // the step after which all end; 0: not yet
  std::array<std::atomic<std::uint32_t>, kRanks> done{};  // steps, by rank
  std::atomic<std::uint32_t> shifted{0};                  // the most weights that a rank has used
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto process = start_rank(rank, scheduler.port(), hosts[rank]);
      {
        Rank one(*process, rank);
        ++ready;
        for (std::uint32_t step = 1; stop_at == 0 || step <= stop_at; ++step) {
          one.step(step);
          if (testing::Test::HasFatalFailure()) break;
          done[rank] = step;
          shifted = std::max(shifted.load(), one.latest());
        }
      }
      EXPECT_TRUE(process->shutdown(30));
    });
  }
  EXPECT_TRUE(eventually([&] { return ready == kRanks; }, 60));
  std::minstd_rand random(7);
  const Deadline patience = Deadline::after(60);
  const auto goes_on = [&] { return !patience.passed() && !testing::Test::HasFailure(); };
  while ((shifted < 20 || done[0] < 50) && goes_on()) {
    std::vector<std::uint64_t> links;
    for (std::uint32_t i = 0; i < kRanks; ++i) links.push_back(1000 + random() % 4000);
    scheduler.shift(links);
    // A start that sees two shifts is refused as too slow: all that are under way now end before the next one.
    std::array<std::uint32_t, kRanks> enough{};
    for (std::size_t i = 0; i < kRanks; ++i) enough[i] = done[i] + 1;
    const auto is_behind = [&] {
      for (std::size_t i = 0; i < kRanks; ++i) {
        if (done[i] < enough[i]) return true;
      }
      return false;
    };
    EXPECT_TRUE(eventually([&] { return !is_behind() || !goes_on(); }, 60));
  }
  stop_at = done[0] + 10;
  for (auto& thread : threads) thread.join();
  EXPECT_GE(shifted, 20U);
}

TEST(Shift, SumsStayRightWhileServersGetOtherWeights) {
  run_job({"a", "b", "c", "d"});
}

TEST(Shift, SumsStayRightWhereRanksOfAHostSumFirst) {
  run_job({"a", "a", "b", "c"});  // between two hosts alone nothing would move
}

// A round that has got its number must begin: one that only one rank gave up would leave that rank a round ahead of the
// others, for ever.
TEST(Shift, ACallWhoseDeadlinePassesMeanwhileIsOneOfAllRanks) {
  std::atomic<std::uint32_t> failed{0};
  van::Scheduler scheduler = start_scheduler();
  std::atomic<bool> is_called_off{false};
  const auto rank_main = [&](std::uint32_t rank) {
    const auto process = start_rank(rank, scheduler.port(), std::string(1, static_cast<char>('a' + rank)));
    {
      worker::Worker& worker = process->worker();
      std::vector<float> memory(1000, 1);
      const van::TensorSpec spec{0, "t", static_cast<std::uint8_t>(Dtype::kFloat32), memory.size(), ""};
      const auto tensor = worker.declarations().declare(std::vector{spec}).front();
      worker::Request request;
      request.input = request.output = reinterpret_cast<std::byte*>(memory.data());
      request.input_allocation = request.output_allocation = {std::as_writable_bytes(std::span(memory)), rank + 1};
      std::thread ends_the_shift;
      if (rank == 0) {
        request.timeout_s = 0.05;
        (void)worker.news().begin_shift();  // as if the scheduler had
        ends_the_shift = std::thread([&] {
          EXPECT_TRUE(eventually([&] { return tensor->next_round > 0; }));
          const Deadline late = Deadline::after(2 * request.timeout_s);
          EXPECT_TRUE(eventually([&] { return late.passed(); }));
          is_called_off = true;
          worker.planner().end_shift({});
        });
      }
      const auto late = worker.start(tensor, request);
      EXPECT_TRUE(rank != 0 || is_called_off);
      EXPECT_TRUE(late->wait(Deadline::after(60)));
      try {
        late->rethrow();
      } catch (const Error&) {
        ++failed;
      }
      if (ends_the_shift.joinable()) ends_the_shift.join();
      request.timeout_s = 60;
      std::ranges::fill(memory, 1.0F);
      const auto next = worker.start(tensor, request);
      EXPECT_TRUE(next->wait(Deadline::after(60)));
      EXPECT_NO_THROW(next->rethrow());
      EXPECT_EQ(memory[999], float{kRanks});
    }
    EXPECT_TRUE(process->shutdown(30));
  };
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(rank_main, rank);
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(failed == 0 || failed == kRanks) << failed;
}

}  // namespace
}  // namespace bps::node
