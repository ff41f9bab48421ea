// SPDX-License-Identifier: Apache-2.0
// The worker's face: declares tensors, starts operations, and aborts those that a lost peer had a part in.
//
// Threading: every public function may be called from any thread. Names, groups and losses are kept here under a mutex
// that the data path never sees; the numbers of rounds are atomic members of their tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/trace_writer.h"
#include "transport/reactor.h"
#include "van/hosts.h"
#include "van/server_places.h"
#include "van/server_weights.h"
#include "van/van.h"
#include "worker/failed_operations.h"
#include "worker/gone_members.h"
#include "worker/late_connections.h"
#include "worker/places.h"
#include "worker/prepared_operation.h"
#include "worker/shifts.h"
#include "worker/worker_loop.h"

namespace bps::worker {

struct WorkerOptions {
  tensor::KeyMapConfig key_map;
  tensor::CutRule cut;
  van::ServerPlaces server_places;
  // How much each server sums for a group; nothing: the servers of key_map in turn.
  std::optional<van::ServerWeights> weights;
  // Server rank of each worker rank's own process, or empty: reduce_scatter sums a shard where it is wanted.
  std::vector<std::uint32_t> own_server;
  van::Hosts hosts;
  bool times_operations = false;
  TraceWriter* trace = nullptr;  // is told the names of tensors
  bool two_phase = false;        // operations survive the loss of servers: see tensor::kTwoPhase
};

class Worker {
 public:
  Worker(WorkerOptions options, van::Van& van);

  // Set-up: each worker loop, in order, with the places (places.h) that it is connected to; both outlive the worker's
  // last operation.
  void add_loop(WorkerLoop* worker_loop, transport::Reactor* reactor, std::span<const std::size_t> connected);
  const Places& places() const { return places_; }
  // Returns what each server sums of the tensors that this rank has declared.
  Deal deal() const;

  // Groups other than all ranks may need more connections; they are made when a tensor is declared.
  void connect_by(LateConnections::Connect connect) { late_connections_.connect_by(std::move(connect)); }

  // One round trip for those not declared yet. `shape` is for people. Throws kMismatch when a name is used again with
  // another dtype or size, on this rank or on another one.
  std::vector<std::shared_ptr<Tensor>> declare(std::span<const van::TensorSpec> tensors);
  std::shared_ptr<Operation> start(const std::shared_ptr<Tensor>& whose, const Request& request,
                                   const DeviceMemory& memory = {});
  // Starts what was prepared once more; `awaited` as in Request. Throws kInvalidArgument while it is in progress.
  void start(PreparedOperation& prepared, bool awaited);

  // Partitions have at most so many bytes; to be called before there are tensors.
  void limit_partitions(std::uint64_t bytes) { options_.cut.limit(bytes); }

  // Aborts an operation for all ranks; it is done when its memory is the caller's again.
  void abort(const std::shared_ptr<Operation>& operation, ErrorCode code, const std::string& what,
             const std::string& hint);
  // Aborts all operations, and waits until none is under way any more; false at the deadline. No new ones may start.
  bool end_operations(ErrorCode code, const std::string& what, const std::string& hint, const Deadline& deadline);
  // Operations are in two phases where they can be.
  bool survives_servers() const { return options_.two_phase; }
  // True when the loss of servers has left nothing behind that the ranks cannot make good: they can for operations in
  // two phases. Compression, weights that servers keep, and push() and pull() apart are not among these.
  bool can_go_on() const { return options_.two_phase && !has_one_phase_.load(); }
  // Takes the operations in two phases that the end of the view has aborted, and the last ones that were not complete
  // at their deadlines. Once the loops are down, those that are suspended can go on in the next view, if it has the
  // same workers.
  std::vector<std::shared_ptr<Operation>> take_incomplete() { return failed_.take_incomplete(); }
  // A name that is used once, cut into partitions like a tensor of the view before: the number of servers decides that.
  std::shared_ptr<Tensor> declare_like(const Tensor& like, std::uint32_t group, const std::string& name);
  // Goes on with one of them, or with some of its partitions (in order), as this round of a tensor of the new view.
  std::shared_ptr<Operation> resume(const std::shared_ptr<Tensor>& tensor, const Operation& suspended,
                                    std::uint32_t round, std::span<const std::uint32_t> only);
  // Goes on without one that has failed at its deadline: a rank that comes to this round fails at once, and does not
  // wait.
  void refuse(const std::shared_ptr<Tensor>& tensor, const Operation& late, std::uint32_t round,
              const std::string& why);

  // The last operations, for people, at most `most`.
  std::vector<FlightRecorder::Record> recent(std::size_t most) const { return recorder_->list(most); }
  // Called, from any thread, when an operation has failed, except by the end of the job or of its view. Set it before
  // the first one.
  std::function<void()> on_failure;
  // How an operation has failed, or why it could not be started, if none was started since.
  std::string last_failure() const { return failed_.last(sequence_.load()); }

  van::Group new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s);
  van::Group world() const;
  std::shared_ptr<const van::Group> group(std::uint32_t id) const;
  std::uint32_t rank() const;

  // ---- From the van's thread
  // Aborts all operations with kRoundAborted, and refuses further ones.
  void end_view(const Error& why);
  // True, for any thread, when that has happened or an operation has failed with kRoundAborted.
  bool view_ended() const { return *view_ended_; }
  void lose_node(std::uint32_t node, const std::string& why);  // `why` names the cause
  // It has left as it should: what it has contributed to still completes, the rest fails.
  void leave_node(std::uint32_t node, const std::string& why);
  // It runs, although one of our loops hears nothing of it.
  void on_reachable(std::uint32_t node);
  void fail_tensor(std::uint32_t id, const std::string& why);
  // Servers are about to have other weights. Rounds wait until end_shift(); these are the next ones.
  std::vector<van::TensorRound> begin_shift();
  void end_shift(const van::EndShift& shift);
  // The members, with the links that the weights of servers follow now.
  van::Membership membership() const;
  void forget_memory(std::uint64_t identity);

 private:
  struct LoopOf {
    WorkerLoop* worker_loop;
    transport::Reactor* reactor;
  };
  std::shared_ptr<Tensor> make_tensor(const van::TensorSpec& spec, const van::TensorId& id,
                                      const Tensor* like = nullptr);
  void check_compression(const van::TensorSpec& spec) const;
  void check_same(const Tensor& known, const van::TensorSpec& spec) const;
  void check_alive(const Tensor& tensor, tensor::OperationKind kind) const;
  void require_alive(const Tensor& tensor, tensor::OperationKind kind);  // the same, and notes the failure
  static std::uint32_t next_round(Tensor& tensor, const Request& request);
  static std::unique_ptr<DeviceArrays> take_points(const Tensor& tensor, const Request& request,
                                                   const DeviceMemory& memory);
  static void count_tries(Tensor& tensor, Request& request, std::uint32_t round);
  std::shared_ptr<Tensor> alone(Tensor& tensor);
  void require_direct() const;
  std::shared_ptr<Operation> make_operation(const std::shared_ptr<Tensor>& tensor, const Request& request,
                                            std::uint32_t round, std::uint64_t sequence,
                                            std::span<const Begun> only = {},
                                            std::shared_ptr<const Plans> plans = nullptr) const;
  Plans make_plans(const Tensor& tensor, const Places& places, std::span<const std::uint64_t> load);
  std::shared_ptr<const Plans> plans_of(Tensor& tensor, const Request& request, std::uint32_t round);
  void launch(const std::shared_ptr<Operation>& operation, bool awaited);
  void submit(const std::shared_ptr<Operation>& operation);
  // On all loops but `except`, which has done it.
  void cancel(const std::shared_ptr<Operation>& operation, const WorkerLoop* except);
  void note_failure(const std::shared_ptr<Operation>& operation);
  static void mark_failed(Tensor& tensor, const std::string& why);

  WorkerOptions options_;
  van::Van& van_;
  const Places places_;
  std::vector<LoopOf> worker_loops_;
  LateConnections late_connections_;
  GoneMembers gone_;
  mutable std::mutex mutex_;  // declarations, groups
  std::map<std::pair<std::uint32_t, std::string>, std::shared_ptr<Tensor>> tensors_;
  std::vector<std::shared_ptr<Tensor>> more_tensors_;  // which the recorder may name
  const std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();
  std::map<std::uint32_t, std::shared_ptr<const van::Group>> groups_;
  std::map<std::uint32_t, std::string> mismatched_;  // id of a tensor that ranks disagree about -> what to say
  std::atomic<bool> loops_know_{false};              // that the view has ended
  // An operation that a server has aborted may say so before the scheduler does.
  const std::shared_ptr<std::atomic<bool>> view_ended_ = std::make_shared<std::atomic<bool>>(false);
  std::atomic<std::uint64_t> sequence_{0};
  FailedOperations failed_;
  Shifts shifts_;
  std::vector<std::uint64_t> links_;                // of nodes, since the last shift; guarded by mutex_
  mutable std::atomic<bool> has_one_phase_{false};  // an operation was started that has no second one
};

}  // namespace bps::worker
