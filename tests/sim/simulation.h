// SPDX-License-Identifier: Apache-2.0
// One job, from its start to its end, as a seed decides it: its shape, its network, what its programs do, and what
// happens to it. Ends with a Violation if anything does not hold that must.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "process.h"

namespace bps::sim {

struct Fault {
  enum class Kind { kKill, kPowerLoss, kPause, kCut, kBreak, kScheduler } kind{};
  Duration at{};
  Duration length{};  // kPause, kCut; kScheduler: until another one is started
  std::uint32_t process = 0;
  std::uint32_t other = 0;  // kCut: what `process` sends there does not arrive

  std::string describe() const;
};

struct Outcome {
  std::uint64_t hash = 0;
  std::uint64_t events = 0;
  std::uint32_t views = 0;
  std::uint32_t steps = 0;    // committed by the worker that has committed most
  std::uint32_t resumed = 0;  // calls that have gone on in another view
  std::uint32_t gifts = 0;    // parts of results that a rank has got from another one
  std::uint32_t shifts = 0;   // of the weights of servers
  std::uint32_t moved = 0;    // partitions that they have moved, counted on each rank
  std::string violation;      // empty: none
};

class Simulation {
 public:
  // `keep`: which of the seed's faults happen, bit by bit; for shrinking.
  Simulation(std::uint64_t seed, bool prints, std::uint64_t keep = ~std::uint64_t{0});
  // Not as the seed says: a job of this shape, to which these faults happen.
  Simulation(std::uint64_t seed, const Shape& shape, const std::vector<Fault>& faults);

  Outcome run();
  const std::vector<Fault>& faults() const { return faults_; }
  Network& network() { return network_; }
  std::string describe() const;

 private:
  void make_processes();
  void add(const Fault& fault);
  void draw_faults(std::uint64_t keep);
  void happen(const Fault& fault);
  void lose_scheduler(const Fault& fault);
  void end_process(Machine machine);
  void run_until_end();
  bool is_at_end() const;
  bool is_mild() const;
  bool is_unseen() const;
  void check_end();

  EventQueue events_;
  Trace trace_;
  Random random_;
  const Shape shape_;
  Network network_;
  Scheduler scheduler_;
  std::vector<Fault> faults_;
  Time last_fault_{};
  std::string ended_for_nothing_;
  bool never_began_ = false;  // without a process that was lost before the first view
  std::vector<std::unique_ptr<Process>> processes_;
};

}  // namespace bps::sim
