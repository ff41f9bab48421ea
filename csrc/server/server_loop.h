// SPDX-License-Identifier: Apache-2.0
// Runs one loop of a server: it admits the sessions of workers, and drives what they share.
//
// It is composed of a pool of slots, a WorkerSession for each worker loop that it serves, with a SlotWindow each, and a
// RoundEngine, to which the sessions hand what arrives on the data plane. What the loop itself does is rare: it accepts
// connections, answers control messages, and abandons the sessions of a worker that is lost. step() does what the data
// path put off: it lets rounds go on that wait for memory, drops the rounds of lost workers, and sends the answers and
// credits that are due.
//
// Belongs to its reactor's thread. Errors: accept() throws what accepting a connection throws. A worker that cannot be
// served is told so, and the others go on.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/metrics.h"
#include "server/round_engine.h"
#include "server/slot_pool.h"
#include "server/worker_session.h"
#include "transport/reactor.h"
#include "transport/shm/shared_memory.h"
#include "van/membership.h"

namespace bps::server {

struct ServerLoopOptions {
  std::uint32_t window = 8;       // large landing slots per worker loop, at most
  std::uint64_t slot_memory = 0;  // bytes for the slots of all workers, which share it; 0: no limit
  // It may keep so many bytes between rounds, for all workers: see MemoryShares.
  std::uint64_t kept_memory = ~std::uint64_t{0};
  std::uint64_t largest_partition = 0;    // in bytes; more is refused
  RoundTable::Limits table{};             // limits what one worker may make it keep
  std::uint32_t epoch = 1;                // what carries another epoch is dropped and counted
  std::uint32_t node = 0;                 // the number of this process in the membership
  transport::Reactor* reactor = nullptr;  // has the timers, and hears when memory is made, which takes long
};

class ServerLoop final : public transport::Actor, private SessionOwner {
 public:
  ServerLoop(ServerLoopOptions options, const van::Membership& membership,
             std::vector<transport::Transport*> slot_transports, Counters& counters);

  // Takes a worker's connection, which came by `transport`, or rejects it with a line in the log.
  void accept(std::unique_ptr<transport::IncomingConnection> incoming, transport::Transport* transport);
  // `call` is called after a round has failed. It is to be set before the reactor starts.
  void when_round_fails(std::function<void()> call) { rounds_.when_round_fails(std::move(call)); }
  void add_group(const van::Group& group) { rounds_.add_group(group); }
  // Makes this loop a relay of its host: it runs the rounds of the host's ranks, and sends on what they contribute.
  tensor::ContributionSource& relay_by(tensor::ContributionSender& network) { return rounds_.relay_by(&network); }
  // To be called when a worker is lost. Its rounds can never complete, and fail in the next step(), for this reason.
  void lose_node(std::uint32_t node, const std::string& why);
  // Makes rounds fail with this error from here on, whichever member is the cause, because the view has ended.
  void end_view(const Error& why) { rounds_.gone().end_view(why); }
  // To be called when a worker has left as it should. Rounds that it has pushed complete; the others fail in the next
  // step().
  void leave_node(std::uint32_t node, const std::string& why);
  void fail_tensor(std::uint32_t tensor, const std::string& why) { rounds_.gone().disagree(tensor, why); }
  // Returns true when no round is open, and the workers have all that they were sent.
  bool is_quiet() const;

  bool step() override;
  bool blocked() const override { return blocked_; }

  // Is called once when the connection to a worker breaks, and to be answered with lose_node(), soon. Where it is not
  // set, the rounds of that worker fail at once. It is to be set before the reactor starts.
  std::function<void(std::uint32_t node, const std::string& why)> when_lost;

  std::uint64_t slot_bytes() const { return pool_.bytes(); }
  // Counts the slots that are free, and of which their workers have not heard.
  std::size_t untold_slots() const;
  // Returns true when a worker is connected. Any thread may call it.
  bool serves() const { return clients_ > 0; }
  std::size_t open_rounds() const { return rounds_.open_rounds(); }
  // Lists the first `most` of them, on the reactor's thread.
  std::vector<OpenRound> list_open(std::size_t most) const { return rounds_.list_open(most); }
  // Calls `look` with each data connection to a worker that is not lost, and the worker's node.
  void for_each_connection(const std::function<void(std::uint32_t, transport::DataEndpoint&)>& look) const {
    for (const auto& session : sessions_) session->for_each_connection(look);
  }
  double oldest_round_s() const { return rounds_.oldest_s(); }
  const std::string& last_failure() const { return rounds_.last_failure(); }
  // Returns the last rounds that are over. Any thread may read them.
  const RoundRecorder& recorder() const { return rounds_.recorder(); }

 private:
  void on_message(WorkerSession& from, std::span<const std::byte> message) override;
  void on_lost(WorkerSession& session, const std::string& why) override;
  WorkerSession* admit(const transport::Hello& hello, transport::Transport& transport);
  void attach(WorkerSession& session, const tensor::Attach& attach);
  void share_log(WorkerSession& session);
  void reject(WorkerSession& session, const Error& error);
  void settle(WorkerSession& session, const tensor::PathLost& lost);
  void check_paths();
  void count_clients();
  void forget_lost();
  bool send_answers();
  void send_credits();

  // Holds the redo log, registered with each transport by which members share it.
  struct SharedLog {
    std::shared_ptr<transport::shm::SharedMemory> memory;
    std::unique_ptr<tensor::RedoLog> log;
    std::map<transport::Transport*, transport::RegionPtr> regions;
  };

  const ServerLoopOptions options_;
  const van::Membership membership_;
  const van::Hosts hosts_;
  Counters& counters_;
  SlotPool pool_;
  SendsDue sends_due_;
  Sessions sessions_;
  SharedLog shared_log_;
  RoundEngine rounds_;
  std::atomic<std::size_t> clients_{0};  // sessions that are not lost
  std::optional<Timer> path_check_;      // runs while a session has several paths
  bool losses_due_ = false;
  bool blocked_ = false;  // answers wait for a send window
};

}  // namespace bps::server
