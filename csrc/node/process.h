// SPDX-License-Identifier: Apache-2.0
// Runs one process of a job: its loops, its listeners, its connection to the scheduler, and its worker. In an embedded
// job rank 0 also hosts the scheduler.
//
// start() brings everything up and returns when this process has joined and is connected. shutdown() leaves the job,
// waits for the other workers within the deadline, and takes everything down. The object belongs to one view of the
// job. When a view ends and the job goes on (BPS_MIN_WORKERS), everything fails with kRoundAborted. renew() then takes
// the process into the next view.
//
// Any thread may call these. A caller that may meet a shutdown() of another thread, or of a signal handler, holds a
// Process::Call meanwhile. That throws kNotInitialized once the shutdown has begun, and nothing is taken down before it
// ends. Waits end at the shutdown, and can be interrupted (core/interrupt.h). A process that is forked may do nothing
// with the object, not even destroy it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/state.h"
#include "core/trace_writer.h"
#include "node/call_gate.h"
#include "node/current_view.h"
#include "node/inspection.h"
#include "node/job_secret.h"
#include "node/metrics_server.h"
#include "node/report.h"
#include "node/self.h"
#include "node/startup.h"

namespace bps::van {
class Scheduler;
class Van;
}  // namespace bps::van
namespace bps::worker {
class Operation;
class Worker;
}  // namespace bps::worker

namespace bps::node {

enum class ProcessState : std::uint8_t {
  kUp,
  kAborted,  // it has told everybody that it ends with an exception
  kDown,     // nothing of it is left that peers or threads could use
};
constexpr const char* name_of(ProcessState) {
  return "a process";
}
constexpr std::array<std::uint16_t, 3> arrows_of(ProcessState) {
  return {
      arrows_to(ProcessState::kAborted, ProcessState::kDown),
      arrows_to(ProcessState::kAborted, ProcessState::kDown),
      arrows_to(ProcessState::kDown),
  };
}

class Process {
 public:
  // Marks one call into this process.
  class Call {
   public:
    explicit Call(Process& process) : call_(process.calls_) {}

   private:
    CallGate::Call call_;
  };

  static std::unique_ptr<Process> start(const Settings& settings, const Startup& startup);
  // Takes the process into the view that follows one that has ended. Ends what is under way, and waits until all
  // members that are left have come, for as long as an operation may take. Throws kPeerLost when too few are left, and
  // kTimeout, which names who has not come. `ended` is down afterwards.
  static std::unique_ptr<Process> renew(Process& ended);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  worker::Worker& worker();  // throws kInvalidArgument on a process that is not a worker
  van::Van& van() { return *van_; }
  double operation_timeout_s() const { return options_.settings.deadlines.operation; }
  // Returns true when operations survive the loss of servers (BPS_SERVER_FAILOVER), except those that
  // Worker::can_go_on() names.
  bool survives_servers() const { return options_.survives_servers(); }
  // Returns the address by which the other members reach this host: that of the first of its interfaces that the job
  // uses. It is numeric, or a name.
  std::string address() const;
  // Returns true when only those who were told a secret can be members.
  bool is_authenticated() const { return secret_.is_secret; }
  // Reads this process as it is now. The report must be used at once.
  Report report() const;
  // Returns null when nothing is traced.
  TraceWriter* trace() { return trace_.get(); }

  // Leaves the job. Returns false when the others did not all leave in time, or a member was lost. When the wait is
  // interrupted, everything is taken down all the same. Within a Call of the same thread, the end of that Call takes
  // everything down. `suspends` says that workers are going to come back; dedicated servers wait for them.
  bool shutdown(double timeout_s, bool suspends = false);
  // Leaves the job without waiting for the others. Servers and a scheduler here go on for them until stay(), which must
  // follow, has returned. Returns false when this process has left already; then nothing follows. `timeout_s` is for
  // the scheduler.
  bool depart(double timeout_s);
  // Comes after depart(). Returns when all others have left, or after end_stay(), and takes everything down then.
  void stay();
  void end_stay();
  bool is_down() const { return state_.is(ProcessState::kDown); }
  // Tells everybody that this process ends with an exception ("ValueError: no such file"); shutdown() must follow.
  void abort(const std::string& exception);
  // Takes, after renew(), what was under way and can go on if the next view has the same workers. Also takes what has
  // failed at its deadline on all ranks, as other ranks may not have been told.
  std::vector<std::shared_ptr<worker::Operation>> take_incomplete() { return std::move(incomplete_); }
  // Returns true, after renew(), if nothing was done in its view that does not survive.
  bool can_go_on() const { return can_go_on_; }
  // Returns true when the job goes on without this object: renew().
  bool view_ended() const { return current_.has_ended(); }

 private:
  Process(const Settings& settings, const Startup& startup);
  explicit Process(Process& ended);
  static std::unique_ptr<Process> bring_up(std::unique_ptr<Process> process, const Process* before);
  void bring_up(const Process* before);
  std::optional<std::string> begin_leaving();
  bool leave(const std::function<bool()>& say_goodbye);
  void end_operations();
  void retire();
  void take_down();
  void take_down_loops();
  void make_view();

  CallGate calls_;
  const ProcessOptions options_;
  const JobSecret secret_;
  const Lineage lineage_;
  std::unique_ptr<van::Scheduler> scheduler_;
  std::unique_ptr<van::Van> van_;
  std::unique_ptr<TraceWriter> trace_;        // outlives the loops
  std::unique_ptr<TraceWriter> ended_trace_;  // that of this view at its end, or of the one before: is still written
  CurrentView current_{options_, secret_.credentials};
  State<ProcessState, std::atomic<ProcessState>> state_;
  std::vector<std::shared_ptr<worker::Operation>> incomplete_;
  bool can_go_on_ = false;
  CurrentInspection inspection_;
  std::unique_ptr<MetricsServer> metrics_server_;
};

}  // namespace bps::node
