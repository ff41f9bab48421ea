// SPDX-License-Identifier: Apache-2.0
// Makes a scheduler and vans inside the test's process, and small helpers around them.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "concatenate.h"
#include "core/error.h"
#include "eventually.h"
#include "transport/message_mac.h"
#include "van/scheduler.h"
#include "van/van.h"

namespace bps::van::test {

inline const transport::Credentials kJob = transport::Credentials::from("job", "secret");

inline std::unique_ptr<Scheduler> make_scheduler(std::uint32_t workers, std::uint32_t servers,
                                                 const std::function<void(SchedulerOptions&)>& change = {},
                                                 const transport::Credentials& job = kJob) {
  SchedulerOptions options{
      .address = "127.0.0.1", .ports = {0}, .workers = workers, .servers = servers, .on_lost = nullptr};
  options.join_timeout_s = 20;
  options.heartbeat_timeout_s = 5;  // sanitizers on a busy machine are slow; tests of silence set their own
  if (change) change(options);
  return std::make_unique<Scheduler>(options, job);
}

// Makes a message as it goes over the stream: behind its length, and before its authentication code.
inline Bytes framed(const Bytes& message, transport::MessageSigner& signer) {
  const auto length = static_cast<std::uint32_t>(message.size());
  const Bytes signed_bytes = concatenate({std::as_bytes(std::span(&length, 1)), message});
  return concatenate({signed_bytes, signer.sign(signed_bytes)});
}

// Writes down the events of a van.
class TestNode {
 public:
  explicit TestNode(std::vector<std::uint16_t> ports, const transport::Credentials& job = kJob,
                    double join_timeout_s = 20, std::uint32_t renews = 0)
      : van_(std::make_unique<Van>(
            VanOptions{.scheduler_host = "127.0.0.1",
                       .scheduler_ports = std::move(ports),
                       .join_timeout_s = join_timeout_s,
                       .renews = renews},
            job,
            VanEvents{
                .on_lost = [this](std::uint32_t node, const std::string& why) { note(lost_, node, why); },
                .on_left = [this](std::uint32_t node, const std::string& why) { note(left_, node, why); },
                .on_reachable = nullptr,
                .on_group =
                    [this](const Group& group, const std::function<void()>& known) {
                      note(groups_, group.id, group);
                      if (known) known();
                    },
                .on_tensor_failed = [this](std::uint32_t id, const std::string& why) { note(failed_, id, why); },
                .on_round_failed = [this](const RoundFailed& failed) { note(rounds_, failed.tensor, failed.text); }})) {
  }

  Terms terms;  // the node joins with these
  Van* operator->() { return van_.get(); }
  void destroy() { van_.reset(); }
  void join(std::int32_t worker, std::int32_t server, std::uint32_t workers, std::uint32_t servers) {
    Node self;
    self.worker_rank = worker;
    self.server_rank = server;
    self.host = "a";
    self.pid = 42;
    self.identity = static_cast<std::uint64_t>(worker + 8) * 1000 + static_cast<std::uint64_t>(server + 8);
    self.worker_loops = self.server_loops = 1;
    self.terms = terms;
    van_->join(self, workers, servers);
  }
  Group all() {
    Group group;
    for (std::uint32_t i = 0; i < van_->membership().workers; ++i) group.ranks.push_back(i);
    return group;
  }
  std::map<std::uint32_t, std::string> lost() { return read(lost_); }
  std::map<std::uint32_t, std::string> left() { return read(left_); }
  std::map<std::uint32_t, std::string> failed() { return read(failed_); }
  std::map<std::uint32_t, std::string> rounds() { return read(rounds_); }  // the rounds that have failed, by tensor
  std::map<std::uint32_t, Group> groups() { return read(groups_); }

 private:
  template <typename T>
  void note(std::map<std::uint32_t, T>& where, std::uint32_t key, const T& value) {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(where.try_emplace(key, value).second) << "reported twice";
  }
  template <typename T>
  T read(const T& what) {
    const std::lock_guard lock(mutex_);
    return what;
  }

  std::mutex mutex_;
  std::map<std::uint32_t, std::string> lost_;
  std::map<std::uint32_t, std::string> left_;
  std::map<std::uint32_t, std::string> failed_;
  std::map<std::uint32_t, std::string> rounds_;
  std::map<std::uint32_t, Group> groups_;
  std::unique_ptr<Van> van_;
};

// Runs each function on a thread of its own, and waits for all.
inline void together(const std::vector<std::function<void()>>& functions) {
  std::vector<std::thread> threads;
  for (const auto& function : functions) threads.emplace_back(function);
  for (auto& thread : threads) thread.join();
}

// Calls one function on a thread for each of `count` members.
inline void together(std::size_t count, const std::function<void(std::size_t)>& function) {
  std::vector<std::function<void()>> functions;
  for (std::size_t i = 0; i < count; ++i) functions.push_back([&function, i] { function(i); });
  together(functions);
}

struct Thrown {
  ErrorCode code;
  std::string what;
  std::string hint;
};
// Returns what a call throws. The test fails, and the code is kInternal, when it throws nothing.
inline Thrown thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_FALSE(error.hint().empty()) << error.what();
    return {error.code(), error.what(), error.hint()};
  }
  ADD_FAILURE() << "nothing thrown";
  return {ErrorCode::kInternal, "", ""};
}

// Makes a job of workers that are servers too, all joined.
struct JointJob {
  explicit JointJob(std::uint32_t count, const std::function<void(SchedulerOptions&)>& change = {})
      : scheduler(make_scheduler(count, count, change)) {
    SchedulerOptions options;
    if (change) change(options);
    for (std::uint32_t i = 0; i < count; ++i) {
      nodes.push_back(std::make_unique<TestNode>(std::vector{scheduler->port()}));
      nodes.back()->terms = options.terms;
    }
    together(count, [&](std::size_t i) { nodes[i]->join(static_cast<std::int32_t>(i), kAnyRank, count, count); });
  }
  TestNode& operator[](std::size_t i) { return *nodes[i]; }
  void leave_all() {
    together(nodes.size(), [&](std::size_t i) { EXPECT_TRUE((*nodes[i])->leave(10)); });
  }

  std::unique_ptr<Scheduler> scheduler;
  std::vector<std::unique_ptr<TestNode>> nodes;
};

}  // namespace bps::van::test
