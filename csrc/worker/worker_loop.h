// SPDX-License-Identifier: Apache-2.0
// One loop of a worker: operations come in, partitions go out, answers come back. All of it runs to completion on one
// thread, so that nothing is handed between threads but the operation itself, once on its way in (a bounded ring) and
// once when its caller wakes.
//
//   submit() -> admit(): set-up, registers memory -> send queue of each server -> Sender -> ... -> on_answer()
//
// An operation that fails is aborted for all ranks: each loop takes what it has not sent off its queues, sends Cancel
// to the servers that hold a part of it, and ends each partition when the server has said that it will not be answered,
// or when its answer has come after all. A server that does not reply counts as lost; a lost server on this host is
// first kept from writing to our memory (DirectAccess::fence()). So no byte changes after the caller has been told.
//
// On a relay it also sends what its host contributes to the rounds of the network (tensor/host_sum.h).
//
// Threading: submit() from any thread, everything else on the reactor's. The parts: worker_loop.cc admits and
// completes; sender.h sends; worker_loop_failures.cc has deadlines and aborts, worker_loop_losses.cc lost servers;
// host_contribution.h is what a relay sends.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/metrics.h"
#include "core/ring.h"
#include "transport/reactor.h"
#include "worker/host_contribution.h"
#include "worker/in_flight.h"
#include "worker/open_partition.h"
#include "worker/operation.h"
#include "worker/sender.h"
#include "worker/server_connection.h"
#include "worker/watched_operations.h"
#include "worker/worker_usage.h"

namespace bps::worker {

struct WorkerLoopOptions {
  std::size_t index = 0;
  std::size_t places = 1;               // server loops of the job, then relays of this host that are not among them
  std::uint64_t scheduling_credit = 0;  // bytes in flight; 0: no limit
  std::uint64_t largest_partition = 0;
  std::uint64_t staging_bytes = 0;
  bool two_phase = false;  // see tensor::kTwoPhase
  std::uint32_t epoch = 1;
  double silence_s = 10;           // after which a server that owes a reply counts as lost
  std::string name = "this rank";  // for errors that all ranks are told
};

class WorkerLoop final : public transport::Actor, public tensor::ContributionSender {
 public:
  WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor);
  ~WorkerLoop();

  // Set-up, on the reactor's thread: makes the sink for the endpoints of a connection; open() it when they are
  // attached.
  ServerConnection& add_server(std::size_t place, std::uint32_t node, std::string name,
                               transport::Transport& transport);
  void open(ServerConnection& server, transport::ControlEndpoint* control, std::vector<transport::DataEndpoint*> data) {
    open(server, {{.control = control, .data = std::move(data)}});
  }
  void open(ServerConnection& server, std::vector<ServerPath> paths);
  // The connection at this place, for a path that has been lost and is connected again; nullptr when it is lost
  // altogether. Then add_path(), once the endpoints are attached.
  ServerConnection* find_server(std::size_t place);
  void add_path(ServerConnection& server, ServerPath path);
  // Makes this loop the way of its host's contributions.
  void relay_for(tensor::ContributionSource* source) { contributions_.set_source(source); }

  // On the reactor's thread, before this rank's first operation on a tensor that was declared with a compression.
  void add_compressed(const std::shared_ptr<const Tensor>& tensor);

  // Any thread may submit, and then wakes the reactor's progress or drives it. Throws kTimeout when the loop does not
  // keep up with the submissions. One loop of each operation watches its deadline.
  void submit(const std::shared_ptr<Operation>& operation, bool watches_deadline);

  // Aborts every operation that `concerns` answers true for. The reactor's thread calls this, and what follows.
  void abort_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code, const std::string& what,
                        const std::string& hint);
  // Cancels this loop's part of an operation that is failing.
  void cancel(Operation& operation);
  // Aborts everything with this error, which also stands for the losses that follow.
  void end_view(const Error& why);
  // `why` is a sentence that names the cause.
  void lose_server(std::uint32_t node, const std::string& why);
  // The scheduler has heard of a server that when_silent was called for.
  void on_reachable(std::uint32_t node);
  void forget_memory(std::uint64_t identity);
  // No operation is on its way, waits to be sent, or has just been submitted.
  bool is_idle() const;
  // Lists partitions that are not finished, at most so many: first those that were sent.
  std::vector<OpenPartition> list_open(std::size_t most) const;
  WorkerUsage usage() const;

  // The rounds of this host call these.
  std::uint64_t largest() const override { return options_.largest_partition; }
  void contribute(std::uint32_t contribution, const tensor::PushHeader& header, std::int32_t priority,
                  std::uint32_t place) override;
  void cancel(std::uint32_t contribution, const Error& why) override;
  void note_landed(std::uint32_t contribution) override;
  void refuse(const tensor::PushHeader& header, std::uint32_t place, const Error& why) override;

  bool step() override;
  bool arm() override { return submissions_.empty() && !receipts_due_ && !landed_due_ && (!has_work_ || blocked_); }
  bool blocked() const override { return blocked_; }

  // The connections call these.
  std::size_t allows_answer(const ServerConnection& server, std::size_t rail, const transport::RemoteSpan& where,
                            std::uint32_t immediate) const;
  void on_cut_off(const ServerConnection& server, std::uint32_t immediate, std::uint64_t bytes);
  // `over`: the connection that brought all of the answer, of which `landed` bytes are here. A server that sends more
  // or fewer bytes than the partition has is lost.
  void on_answer(ServerConnection& server, std::uint32_t immediate, const transport::DataEndpoint* over = nullptr,
                 std::uint64_t landed = 0);
  void on_written(ServerConnection& server, std::uint32_t immediate);
  void on_message(ServerConnection& server, std::span<const std::byte> message);
  void on_lost(ServerConnection& server, const std::string& why);
  void count_stale() { counters_.stale.add(); }
  // The transport reads the bytes of this push no more, whether they have left or not.
  void on_unread(ServerConnection& server, std::uint32_t immediate);
  // Gives the keys of the memory that answers of the server are still to go to: those on one rail, and on another.
  std::vector<tensor::AnswerKeys::Key> answer_keys(const ServerConnection& server, std::size_t rail,
                                                   std::size_t other) const;
  // An answer has come in that the server keeps until it is told.
  void note_receipt() { receipts_due_ = true; }

  // Called once when the connection to a server breaks; answer with lose_server(), soon. Without it the operations of
  // that server fail at once. Set before the reactor starts.
  std::function<void(std::uint32_t node, const std::string& why)> when_lost;
  // Called when a server that owes a reply has been silent for two seconds, although its connection is open. If others
  // hear it, answer with on_reachable().
  std::function<void(std::uint32_t node)> when_silent;
  // Called when one path of several to the server at `place` is lost, and both ends of it are closed; answer with
  // add_path(), when it can be connected again.
  std::function<void(std::size_t place, std::size_t pair)> when_path_lost;
  // Called once for each operation that fails on this loop; the other loops must cancel() their parts of it.
  std::function<void(const std::shared_ptr<Operation>&)> when_failing;

 private:
  struct Submission {
    std::shared_ptr<Operation> operation;
    bool watches_deadline = false;
  };

  bool take_submissions();
  void admit(Portion& portion, ServerConnection& server);
  void prepare(Portion& portion, ServerConnection& server);
  bool register_memory(Portion& portion, ServerConnection& server);
  static RouteFacts facts_of(const Portion& portion, const ServerConnection& server);
  static Reach reach_of(const Portion& portion, const ServerConnection& server);
  void count_unwatched(const Portion& portion);
  static bool compresses_to(const ServerConnection& server, const Tensor& tensor);
  ServerConnection* open_server(std::uint32_t place);
  void add_buffer(ServerConnection& server);
  void complete(std::uint32_t index, bool answered);
  void trace_queued(const Transfer& transfer, const ServerConnection& server);
  void end_unanswered(std::uint32_t index);
  void end_when_unread(std::uint32_t index, InFlight::End end = InFlight::End::kAborted);
  InFlight* find(std::uint32_t immediate, const ServerConnection& server);
  [[gnu::cold]] void lose_for_length(ServerConnection& server, std::uint64_t landed, std::uint64_t due);
  void on_committed(ServerConnection& server, const tensor::Committed& committed);
  void note_landed(const InFlight& entry, std::uint32_t immediate);
  void send_landed();

  // worker_loop_failures.cc
  void abort(Operation& operation, ErrorCode code, const std::string& what, const std::string& hint);
  void abort(Transfer& transfer, ServerConnection& server, ErrorCode code, const std::string& what,
             const std::string& hint);
  void cancel(Transfer& transfer, ServerConnection& server);
  void send_cancel(Transfer& transfer, ServerConnection& server);
  void drop_unsent(Transfer& transfer);
  Error loss(const std::string& why) const;
  bool take_answer(ServerConnection& server, std::uint32_t immediate);
  void fail_answered(std::uint32_t immediate, const Error& why, InFlight::End end = InFlight::End::kAborted);
  Error codec_failure() const;
  void check_deadlines();
  void check_replies();
  void owe(InFlight& entry, InFlight::Owed what);
  void check_owed(Clock::time_point now, bool was_stopped);
  void on_push_failed(ServerConnection& server, const tensor::PushFailed& failed);
  void on_cancelled(ServerConnection& server, const tensor::Cancelled& cancelled);

  // worker_loop_losses.cc
  void lose(ServerConnection& server, const std::string& why);
  void end_all_of(ServerConnection& server);
  void settle(ServerConnection& server, const tensor::PathLost& lost);
  void check_paths();
  void send_receipts();
  static Landed redo(const InFlight& entry);
  Landed landed_of(std::uint32_t index);
  bool suspend(std::uint32_t index);

  const WorkerLoopOptions options_;
  transport::Reactor& reactor_;
  Counters& counters_;
  MpscRing<Submission> submissions_;
  std::vector<std::unique_ptr<TransportMemory>> memory_;    // one per transport
  std::vector<std::unique_ptr<ServerConnection>> servers_;  // by place; null where this loop does not meet the server
  InFlightTable in_flight_;
  HostContributions contributions_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::shared_ptr<const Tensor>> compressed_;  // by group and id
  Sender sender_;
  std::optional<Error> view_ended_;
  WatchedOperations watched_;
  Timer deadline_check_;
  Clock::time_point last_check_ = Clock::now();
  bool is_owed_ = false;             // perhaps: some InFlight::owed is set
  std::optional<Timer> path_check_;  // while a server is reached by several paths
  bool receipts_due_ = false;
  bool landed_due_ = false;
  bool has_work_ = false;
  bool blocked_ = false;
};

}  // namespace bps::worker
