// One process of a job, whole: its loops, its doors, its line to the scheduler, and what it does there as a worker, a
// server or both; in an embedded job rank 0 also hosts the scheduler.
//
// start() brings everything up and returns when this process has joined and is connected; shutdown() says goodbye,
// waits for the others within the deadline, and takes everything down. Threading: both from one thread; the rest from
// any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "core/metrics.h"
#include "transport/handshake.h"
#include "van/membership.h"

namespace bps::van {
class Van;
}
namespace bps::worker {
class Worker;
}

namespace bps::node {

// Who this process is; the launcher's variables, already understood.
struct Startup {
  std::int32_t worker_rank = van::kNoRank;
  std::int32_t server_rank = van::kNoRank;
  std::uint32_t workers = 1;
  std::uint32_t servers = 1;
  bool hosts_scheduler = false;
  bool joint = false;  // every worker is also a server
  std::string scheduler_host = "127.0.0.1";
  std::vector<std::uint16_t> scheduler_ports;
  std::uint32_t processes_on_host = 1;  // of this job, as far as known: says whether spinning would hurt
  std::string job;
  std::string secret;
};

class Process {
 public:
  static std::unique_ptr<Process> start(const Config& config, const Startup& startup);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  worker::Worker& worker();  // throws kInvalidArgument on a process that is none
  van::Van& van();
  const van::Membership& membership() const;
  double operation_timeout_s() const { return timeout_s_; }

  // False when the others did not all leave in time, or somebody was lost.
  bool shutdown(double timeout_s);
  // Servers: blocks until the job is over.
  bool wait_for_end();

  // Counters summed over the loops, then what is not a counter: "slot_bytes", "open_rounds".
  std::vector<std::pair<std::string, std::uint64_t>> metrics() const;
  // How this process reaches each server: "self", "shm", "tcp".
  std::vector<std::string> routes() const;

 private:
  class Impl;
  explicit Process(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  double timeout_s_ = 300;
};

}  // namespace bps::node
