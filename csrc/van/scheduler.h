// SPDX-License-Identifier: Apache-2.0
// The scheduler: rendezvous, barriers, the registry of tensors and groups, and the detector of lost peers.
//
// Small messages only; no tensor byte ever comes here. Runs on a thread of its own, started by the constructor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensor/partition.h"
#include "transport/handshake.h"
#include "van/origin.h"
#include "van/server_weights.h"

namespace bps::van {

struct SchedulerOptions {
  std::string address;               // "" = every interface
  std::vector<std::uint16_t> ports;  // the first free one is taken; {0} = any
  std::uint32_t workers = 1;
  std::uint32_t servers = 1;
  double heartbeat_timeout_s = 1.5;  // silence after which a node counts as lost
  double join_timeout_s = 60;        // from the first member that joins
  bool ends_alone = false;           // also when it has waited that long without any member
  Origin origin{};                   // of the rank that hosts it
  double resume_timeout_s = 0;       // for workers to resume a suspended job; 0: none can be suspended
  Terms terms{};                     // see Job::Options
  bool is_outlived = false;          // members go on without a scheduler that is silent: it then ends
  std::uint64_t run = 0;             // of the job, as the scheduler had it in whose place this one is; 0: a new run
  tensor::CutRule cut{};             // for the key hash `balanced`; the server loops come from the members
  // Tells people that a member is gone without leaving, or has ended with an exception. Runs on the scheduler's thread.
  std::function<void(const std::string& why)> on_lost;
  // The workers have suspended the job, or nobody has resumed it.
  std::function<void(const std::string& what)> on_suspended = nullptr;
};

class Scheduler {
 public:
  // Binds and starts. Throws kPortTaken.
  Scheduler(SchedulerOptions options, const transport::Credentials& credentials);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  std::uint16_t port() const;
  // Blocks until every node has left or the job failed; true when it ended well.
  bool wait();
  // True when it has ended because it was silent for so long that members may have gone on without it. The job may be
  // running, so another scheduler may be started in its place.
  bool stepped_down() const;
  // Ends it at once, from any thread: wait() then returns false, unless the job was over.
  void stop();
  // Gives the servers the weights that follow from these links, of all nodes, if that is possible just now: see
  // shift.h. From any thread.
  void shift(std::vector<std::uint64_t> links);
  // Tells people what the job does, as JSON; {"error"} when the scheduler's thread does not answer soon. From any
  // thread.
  std::string dump() const;
  // The counts of the scheduler: declares, barriers, lost nodes, refused callers; and what is not a counter: members,
  // the number of the view, and for how long the most silent member has said nothing, as of the last look (four in the
  // time-out of heartbeats).
  struct Counters {
    std::uint64_t messages, declared, barriers, lost, refused;
    std::uint64_t members, epoch, silence_ms;
  };
  Counters counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bps::van
