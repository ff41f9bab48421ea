// SPDX-License-Identifier: Apache-2.0
// The scheduler of a simulated job: the real van::Job, and what Scheduler does around it. Its connections to the
// members keep the order of messages, as TCP does, and a member that is silent is lost. It may die, and is then started
// again, knowing nothing.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "network.h"
#include "van/job.h"

namespace bps::sim {

// A member's end of its connection to the scheduler.
struct SchedulerClient {
  Machine machine = 0;
  std::function<void(van::Message)> receive;
  std::function<void()> closed;  // by the scheduler
};

class Scheduler {
 public:
  static constexpr std::uint64_t kRun = 77;  // of the job
  Scheduler(Network& network, std::uint32_t workers, std::uint32_t servers, std::uint32_t least, Duration silence);

  // As the handshake tells it: of the view that who connects now will be in.
  std::uint32_t epoch() const { return epoch_; }
  van::Peer connect(SchedulerClient client);
  // From a member; arrives later, in order.
  void send(van::Peer peer, const van::Message& message);
  // The member ends the connection, or has died.
  void hang_up(van::Peer peer);
  // Of what was sent some arrives, and some does not.
  void die();
  void start();
  bool is_up() const { return is_up_; }
  // Gives the servers the weights that follow from these links, if that is possible just now.
  void shift(const std::vector<std::uint64_t>& links);
  std::uint32_t shifts() const { return shifts_; }  // that are done
  // The first one was called off, and no worker had left.
  bool has_called_off() const { return has_called_off_; }
  bool is_over() const { return is_up_ && job_->phase() == van::Job::Phase::kOver; }
  const van::Job& job() const { return *job_; }
  std::uint32_t views() const { return std::max(views_, job_->epoch()); }

 private:
  struct Connection {
    SchedulerClient client;
    Time last_up{};  // arrival of what was sent last, in each direction
    Time last_down{};
    Time heard{};
    Time ends = Time::max();  // what arrives later was lost with the scheduler
    bool open = true;
  };
  static van::Job::Options options(std::uint32_t workers, std::uint32_t servers, std::uint32_t least, Duration silence);
  void tell_departed();
  void look_at(const van::Message& message);
  void tell(van::Peer peer, const van::Message& message);
  void close(van::Peer peer, const std::string& why);
  void tell_end(van::Peer peer);
  void check();
  Duration travel() { return network_.conditions.delay + network_.random.between({}, network_.conditions.jitter); }

  Network& network_;
  const Duration silence_;
  const van::Job::Options options_;
  bool is_up_ = false;
  std::uint32_t views_ = 0;
  std::uint32_t epoch_ = 1;
  van::Peer last_ = 0;
  std::uint32_t shifts_ = 0;
  std::uint32_t last_shift_ = 0;
  bool has_called_off_ = false;
  bool has_left_ = false;
  std::map<van::Peer, Connection> connections_;
  std::optional<van::Job> job_;
};

}  // namespace bps::sim
