// SPDX-License-Identifier: Apache-2.0
// One loop of a worker: operations come in, partitions go out, answers come back. All of it runs to completion on one
// thread, so that nothing is handed between threads but the operation itself, once on its way in (a bounded ring) and
// once when its caller wakes.
//
//   submit() -> admit(): set-up, registers memory -> send queue of each server -> Sender -> ... -> on_answer()
//
// Threading: submit() from any thread, everything else on the reactor's. The parts: worker_loop.cc admits and
// completes; sender.h sends; worker_loop_losses.cc has deadlines, failures and lost servers.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/metrics.h"
#include "core/ring.h"
#include "transport/reactor.h"
#include "worker/in_flight.h"
#include "worker/operation.h"
#include "worker/sender.h"
#include "worker/server_connection.h"
#include "worker/watched_operations.h"

namespace bps::worker {

struct WorkerLoopOptions {
  std::size_t index = 0;
  std::size_t servers = 1;              // places: loops of servers in the job
  std::uint64_t scheduling_credit = 0;  // bytes in flight; 0: no limit
  std::uint64_t largest_partition = 0;
  std::uint64_t staging_bytes = 0;
};

class WorkerLoop final : public transport::Actor {
 public:
  WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor);
  ~WorkerLoop();

  // Set-up, on the reactor's thread: makes the sink for the endpoints of a connection; open() it when they are
  // attached.
  ServerConnection& add_server(std::size_t place, std::uint32_t rank, std::string name,
                               transport::Transport& transport);
  void open(ServerConnection& server, transport::ControlEndpoint* control, std::vector<transport::DataEndpoint*> data);

  // From any thread; wake the reactor's progress, or drive it, next. Throws kTimeout when the loop does not keep up
  // with the submissions. One loop of each operation watches its deadline.
  void submit(const std::shared_ptr<Operation>& operation, bool watches_deadline);

  // On the reactor's thread: fails every operation that `concerns` answers true for.
  void fail_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code, const std::string& what,
                       const std::string& hint);
  // `why` is a sentence that names the cause.
  void lose_server(std::uint32_t rank, const std::string& why);
  void forget_memory(std::uint64_t identity);

  bool step() override;
  bool arm() override { return submissions_.empty(); }
  bool blocked() const override { return blocked_; }

  // From the connections.
  void on_answer(ServerConnection& server, std::uint32_t immediate);
  void on_message(ServerConnection& server, std::span<const std::byte> message);
  void on_lost(ServerConnection& server, const std::string& why);
  void count_stale() { counters_.stale.add(); }

  // Called once when the connection to a server breaks; answer with lose_server(), soon. Without it the operations of
  // that server fail at once. Set before the reactor starts.
  std::function<void(std::uint32_t server_rank, const std::string& why)> when_lost;

 private:
  struct Submission {
    std::shared_ptr<Operation> operation;
    bool watches_deadline = false;
  };

  bool take_submissions();
  bool admit(Operation::Cursor& cursor, ServerConnection& server);
  void register_memory(Operation::Cursor& cursor, ServerConnection& server);
  void add_buffer(ServerConnection& server);
  void complete(std::uint32_t index);
  InFlight* find(std::uint32_t immediate, const ServerConnection& server);

  // worker_loop_losses.cc
  void lose(ServerConnection& server, const std::string& why);
  void check_deadlines();
  void ask_who_is_missing(const Operation& operation);
  void on_push_failed(ServerConnection& server, const tensor::PushFailed& failed);
  void on_missing(ServerConnection& server, const tensor::Missing& missing);

  const WorkerLoopOptions options_;
  Counters& counters_;
  MpscRing<Submission> submissions_;
  std::vector<std::unique_ptr<TransportMemory>> memory_;    // one per transport
  std::vector<std::unique_ptr<ServerConnection>> servers_;  // by place; null where this loop does not meet the server
  InFlightTable in_flight_;
  Sender sender_;
  WatchedOperations watched_;
  Timer deadline_check_;
  bool has_work_ = false;
  bool blocked_ = false;
};

}  // namespace bps::worker
