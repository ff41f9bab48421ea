// SPDX-License-Identifier: Apache-2.0
// Runs the scheduler of a job: rendezvous, barriers, the registry of tensors and groups, and the detector of lost
// peers.
//
// Only small messages come here, and no byte of a tensor. It runs on a thread of its own, which the constructor starts.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/event_loop.h"
#include "tensor/partition.h"
#include "transport/handshake.h"
#include "transport/listener.h"
#include "van/job.h"
#include "van/origin.h"
#include "van/peers.h"
#include "van/terms.h"

namespace bps::van {

struct SchedulerOptions {
  std::string address;               // "" = every interface
  std::vector<std::uint16_t> ports;  // the first free one is taken; {0} = any
  std::uint32_t workers = 1;
  std::uint32_t servers = 1;
  double heartbeat_timeout_s = 1.5;  // silence after which a node counts as lost
  double join_timeout_s = 60;        // from the first member that joins
  bool ends_alone = false;           // it ends also when it has waited that long without any member
  Origin origin{};                   // that of the rank that hosts it
  double resume_timeout_s = 0;       // for workers to resume a suspended job; 0: none can be suspended
  Terms terms{};                     // see Job::Options
  bool is_outlived = false;          // members go on without a silent scheduler, which then ends
  std::uint64_t run = 0;             // the run of the job, as the scheduler before this one had it; 0: a new run
  tensor::CutRule cut{};             // for the key hash `balanced`; the server loops come from the members
  // Tells people that a member is gone without leaving, or has ended with an exception. Runs on the scheduler's thread.
  std::function<void(const std::string& why)> on_lost;
  // Tells people that the workers have suspended the job, or that nobody has resumed it.
  std::function<void(const std::string& what)> on_suspended = nullptr;
};

class Scheduler {
 public:
  // Binds a port and starts the thread. Throws kPortTaken.
  Scheduler(SchedulerOptions options, const transport::Credentials& credentials);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  std::uint16_t port() const { return port_; }
  // Blocks until every node has left or the job failed. Returns true when the job ended well.
  bool wait() const { return ended_well_.get(); }
  // Returns true when it has ended because it was silent for so long that members may have gone on without it. The job
  // may be running, so another scheduler may be started in its place.
  bool stepped_down() const { return life_ == Life::kSteppedDown; }
  // Ends it at once, from any thread: wait() then returns false, unless the job was over.
  void stop();
  // Gives the servers the weights that follow from these links, if that is possible just now (shift.h). `links` has
  // bytes per second for each node. From any thread.
  void shift(std::vector<std::uint64_t> links);
  // Tells people what the job does, as JSON; {"error"} when the scheduler's thread does not answer soon. From any
  // thread.
  std::string dump();
  // Counts the messages, declared tensors, barriers, lost nodes and refused processes. The second line has no counters:
  // how many members there are, the number of the view, and for how long the most silent member has said nothing.
  // Silence is looked at four times in the time-out of heartbeats.
  struct Counters {
    std::uint64_t messages = 0, declared = 0, barriers = 0, lost = 0, refused = 0;
    std::uint64_t members = 0, epoch = 1, silence_ms = 0;
  };
  Counters counters() const;

 private:
  enum class Life : std::uint8_t { kRunning, kStopped, kSteppedDown };

  void run();
  Duration time_to_join_deadline() const;
  Duration time_to_news() const;
  void tell_departed();
  void begin(std::uint32_t epoch);
  void close_listener();
  void post_entry(transport::AuthenticatedSocket&& socket);
  void receive(Peer peer, Message&& message);
  void send(Peer peer, const Message& message);
  void cut_off(Peer peer, const std::string& why);
  void beat();
  void cut_off_silent();
  bool step_down();
  void publish();

  const SchedulerOptions options_;
  transport::Credentials credentials_;  // belong to the listener's thread, once that runs
  EventLoop loop_;
  transport::ListenerLoop listener_loop_;
  std::unique_ptr<transport::Listener> listener_;
  std::uint16_t port_ = 0;
  Peers peers_;
  Job job_;
  Clock::time_point last_news_{};  // when members were told who is gone
  std::atomic<Life> life_{Life::kRunning};
  mutable std::mutex mutex_;
  Counters counters_;  // guarded by mutex_
  std::promise<bool> end_;
  const std::shared_future<bool> ended_well_;
  std::thread thread_;
};

}  // namespace bps::van
