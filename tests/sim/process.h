// SPDX-License-Identifier: Apache-2.0
// One process of a simulated job: a worker, a server, or both, in one view after another.
//
// It does what node::Process and van::SchedulerSession do with their threads: it tells its loops what the scheduler
// says, and the scheduler what its loops notice; when a view has ended it waits until its operations are over, takes
// its loops down, and joins again.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "program.h"
#include "scheduler.h"

namespace bps::sim {

class Process {
 public:
  enum class State { kJoining, kInView, kRetiring, kLeaving, kRefused, kFailed, kOver, kDead };

  // `number` of the process in its job, and of its machine.
  Process(const Shape& shape, Network& network, Scheduler& scheduler, std::uint32_t number);

  void join();
  // Its machine and its connections end. `silently`: nobody tells the peers, as when a host loses its power.
  void die(bool silently);
  bool break_connection() { return view_ && view_->transport.break_one(); }

  State state() const { return state_; }
  // Nothing more is expected of it.
  bool is_at_end() const { return state_ >= State::kRefused; }
  bool has_been_welcomed() const { return renews_ != 0; }
  bool is_worker() const { return program_ != nullptr; }
  const Program& program() const { return *program_; }
  const std::string& why() const { return why_; }
  // Into the trace: what is under way.
  void show_open() const;
  // At the end of a job that went well: every credit is home, and no round is open.
  void check_end() const;
  // Counts slots that the worker holds, less what it was granted, and those that the server has not announced. Of all
  // processes together this is negative where a slot is lost.
  std::ptrdiff_t slots_beyond_grants() const;

 private:
  static constexpr std::uint32_t kEndOfStep = 7;  // the numbers of its calls of the scheduler
  static constexpr std::uint32_t kFarewell = 8;
  void step();
  void beat();
  void take(van::Peer from, const van::Message& message);
  void begin_view(const van::Welcome& welcome);
  void end_view(const std::string& why);
  void lose_node(std::uint32_t node, const std::string& why);
  void search();
  van::Rejoin what_is_known() const;
  void tell(const van::Message& message);
  static van::Barrier end_of_step() {
    return {.call = kEndOfStep, .group = 0, .partition_bytes = 0, .ends_step = true};
  }
  void suspect(std::uint32_t node, const std::string& why);
  void retire(const std::string& why);
  void take_down();
  bool follow_program();
  void leave(std::uint32_t lost, const std::string& why);
  van::Node describe() const;
  van::Peer connect();

  const Shape& shape_;
  Network& network_;
  Scheduler& scheduler_;
  const std::uint32_t number_;
  const Machine machine_;
  State state_ = State::kJoining;
  std::string why_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<View> view_;
  van::Peer peer_ = 0;  // of the view that it is in
  van::Peer next_ = 0;  // asks for the next one
  std::deque<std::pair<van::Peer, van::Message>> inbox_;
  std::deque<std::unique_ptr<transport::IncomingConnection>> incoming_;
  std::map<std::uint32_t, std::string> suspected_;
  std::uint32_t lost_node_ = 0;
  std::optional<Time> retires_by_;
  bool barrier_sent_ = false;
  bool leave_sent_ = false;
  std::uint32_t renews_ = 0;
  // For a scheduler in the place of one that was lost.
  van::Membership members_;
  std::uint64_t barriers_ = 0;  // that have ended in this view
  std::vector<std::uint32_t> left_nodes_;
  std::optional<van::Leave> left_;
};

}  // namespace bps::sim
