// SPDX-License-Identifier: Apache-2.0
// The end of a process while threads are within calls into it. Of interest under the thread checker, too.
#include "node/process.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "core/interrupt.h"
#include "transport/listener.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

// A job of one worker that is a server, and hosts the scheduler. `trace`: a folder for a trace, beside which it serves
// metrics; empty: neither.
std::unique_ptr<Process> start_alone(std::uint32_t workers = 1, const std::string& trace = "") {
  SettingValues values;
  if (!trace.empty()) {
    const Fd free = transport::Listener::listen_tcp("127.0.0.1", 0);
    values.set("BPS_METRICS_PORT", std::to_string(transport::Listener::port_of(free.get())), "argument");
    values.set("BPS_TRACE", trace, "argument");
  }
  values.set("BPS_TIMEOUT", "60", "argument");
  values.set("BPS_JOIN_TIMEOUT", "60", "argument");
  values.set("BPS_TRANSPORT", "shm,tcp", "argument");
  values.set("BPS_SECRET", "a secret of the tests, long enough", "argument");
  Startup startup;
  startup.worker_rank = startup.server_rank = 0;
  startup.workers = startup.servers = workers;
  startup.hosts_scheduler = startup.joint = true;
  startup.scheduler_ports = {0};
  startup.job = "job";
  return Process::start(values.parse(), startup);
}

// A caller with memory of its own.
class Caller {
 public:
  explicit Caller(Process& process, std::size_t number) : process_(process), number_(number), memory_(4096, 1.0F) {}

  void push_pull() {
    const auto operation = start();
    (void)operation->wait(Deadline::after(30));
    operation->rethrow();
  }
  void declare() {
    const Process::Call call(process_);
    (void)process_.worker().declarations().declare(std::vector{spec(std::to_string(next_++))});
  }
  void barrier() {
    const Process::Call call(process_);
    process_.van().barrier(process_.worker().declarations().world(), 60);
  }
  void new_group() {
    const Process::Call call(process_);
    (void)process_.worker().declarations().new_group({0}, std::to_string(number_) + "." + std::to_string(next_++), 60);
  }
  void metrics() {
    const Process::Call call(process_);
    (void)process_.report().metrics();
    (void)process_.report().metric_families();
    (void)process_.report().transports();
  }

 private:
  van::TensorSpec spec(const std::string& name) const {
    return {0, std::to_string(number_) + "." + name, static_cast<std::uint8_t>(Dtype::kFloat32), memory_.size(), ""};
  }
  std::shared_ptr<worker::Operation> start() {
    const Process::Call call(process_);
    if (!tensor_) tensor_ = process_.worker().declarations().declare(std::vector{spec("tensor")}).front();
    worker::Request request;
    request.input = request.output = reinterpret_cast<std::byte*>(memory_.data());
    request.input_allocation = request.output_allocation = {std::as_writable_bytes(std::span(memory_)), number_ + 1};
    request.awaited = true;
    return process_.worker().start(tensor_, request);
  }

  Process& process_;
  const std::size_t number_;
  std::vector<float> memory_;
  std::shared_ptr<worker::Tensor> tensor_;
  int next_ = 0;
};

TEST(Process, AShutdownMeetsCallsOfOtherThreads) {
  constexpr void (Caller::* kCalls[])() = {&Caller::push_pull, &Caller::declare, &Caller::barrier, &Caller::new_group,
                                           &Caller::metrics};
  const auto folder = std::filesystem::temp_directory_path() / ("bps-process-" + std::to_string(::getpid()));
  for (int round = 0; round < 4; ++round) {
    const auto process = start_alone(1, round % 2 == 0 ? "" : folder.string());
    std::atomic<std::size_t> working{0};
    std::vector<std::unique_ptr<Caller>> callers;
    std::vector<std::thread> threads;
    for (const auto call : kCalls) {
      callers.push_back(std::make_unique<Caller>(*process, callers.size()));
      threads.emplace_back([&working, call, caller = callers.back().get()] {
        try {
          for (bool first = true;; first = false) {
            (caller->*call)();
            if (first) ++working;
          }
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kNotInitialized) << error.what();
        }
      });
    }
    while (working < threads.size()) std::this_thread::yield();
    process->shutdown(10);
    EXPECT_TRUE(process->is_down());
    for (auto& thread : threads) thread.join();
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "worker-0" / "comm.json"));
  std::filesystem::remove_all(folder);
}

TEST(Process, AShutdownWithinACallOfTheSameThread) {
  const auto process = start_alone();
  {
    const Process::Call call(*process);
    EXPECT_TRUE(process->shutdown(10));
    EXPECT_FALSE(process->is_down()) << "the call goes on";
    EXPECT_EQ(process->van().membership().workers, 1U);
  }
  EXPECT_TRUE(process->is_down());
  EXPECT_FALSE(process->shutdown(10)) << "again";
}

TEST(Process, AStartThatIsInterruptedLeavesNothingRunning) {
  struct Stopped {};
  int looks = 0;
  const InterruptScope scope([&] {
    if (++looks == 2) throw Stopped();
  });
  EXPECT_THROW((void)start_alone(2), Stopped);  // nobody else comes
  EXPECT_EQ(looks, 2);
}

}  // namespace
}  // namespace bps::node
