// SPDX-License-Identifier: Apache-2.0
// The worker's face: starts operations, and aborts those that a lost peer had a part in.
//
// Threading: set-up belongs to one thread, and ends before the first operation; everything else may be called from any
// thread. The numbers of rounds are atomic members of their tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/reactor.h"
#include "van/van.h"
#include "worker/declarations.h"
#include "worker/failed_operations.h"
#include "worker/planner.h"
#include "worker/prepared_operation.h"
#include "worker/view_news.h"
#include "worker/worker_loops.h"
#include "worker/worker_options.h"

namespace bps::worker {

// Throws kInvalidArgument for an operation that does not take the memory of a device.
void check_on_device(const Tensor& tensor, const Request& request);

class Worker {
 public:
  Worker(WorkerOptions options, van::Van& van);

  // ---- Set-up
  // Adds each worker loop, in order, with the places (places.h) that it is connected to; both outlive the worker's last
  // operation.
  void add_loop(WorkerLoop* worker_loop, std::span<const std::size_t> connected);
  // Partitions have at most so many bytes; to be called before there are tensors.
  void limit_partitions(std::uint64_t bytes) { options_.cut.limit(bytes); }
  // Called, from any thread, when an operation has failed, except by the end of the job or of its view.
  std::function<void()> on_failure;

  Planner& planner() { return planner_; }
  const Planner& planner() const { return planner_; }
  Declarations& declarations() { return declarations_; }
  // Returns what each server sums of the tensors that this rank has declared.
  Deal deal() const { return planner_.deal(declarations_.all()); }

  // Starts the next round of a tensor, or, for an addition to stored weights, of this rank's own copy of it. Blocks
  // while a loop's ring is full, or servers get other weights. Throws kInvalidArgument, kMismatch, kPeerLost, kTimeout.
  std::shared_ptr<Operation> start(const std::shared_ptr<Tensor>& declared, const Request& request,
                                   const DeviceMemory& memory = {});
  // Starts what was prepared once more; `awaited` as in Request. Throws kInvalidArgument while it is in progress.
  void start(PreparedOperation& prepared, bool awaited);

  // Aborts an operation for all ranks; it is done when its memory is the caller's again.
  void abort(const std::shared_ptr<Operation>& operation, ErrorCode code, const std::string& what,
             const std::string& hint);
  // Aborts all operations, and waits until none is under way any more; false at the deadline. Later ones are refused.
  bool end_operations(ErrorCode code, const std::string& what, const std::string& hint, const Deadline& deadline);
  // Operations are in two phases where they can be.
  bool survives_servers() const { return options_.survives_servers; }
  // True when the loss of servers has left nothing behind that the ranks cannot make good: they can for operations in
  // two phases. Compression, weights that servers keep, and push() and pull() apart are not among these.
  bool can_go_on() const { return options_.survives_servers && !has_one_phase_.load(); }
  // Takes the operations in two phases that the end of the view has aborted, and the last ones that were not complete
  // at their deadlines. Once the loops are down, those that are suspended can go on in the next view, if it has the
  // same workers.
  std::vector<std::shared_ptr<Operation>> take_incomplete() { return failed_.take_incomplete(); }
  // Goes on with one of them, or with some of its partitions (in order), as this round of a tensor of the new view.
  std::shared_ptr<Operation> resume(const std::shared_ptr<Tensor>& tensor, const Operation& suspended,
                                    std::uint32_t round, std::span<const std::uint32_t> only);
  // Goes on without one that has failed at its deadline: a rank that comes to this round fails at once, and does not
  // wait.
  void refuse(const std::shared_ptr<Tensor>& tensor, const Operation& late, std::uint32_t round,
              const std::string& why);
  // This rank cannot take part in the next round, for a reason that the others do not have: it fails on all of them.
  void decline(const std::shared_ptr<Tensor>& tensor, const Request& request, const Error& why);

  // The last operations, for people, at most `most`.
  std::vector<FlightRecorder::Record> recent(std::size_t most) const { return recorder_->list(most); }
  // Returns how the last operation failed, or could not be started; "" if one was started since.
  std::string last_failure() const { return failed_.last(sequence_.load()); }

  // The van tells its news here.
  ViewNews& news() { return news_; }
  const ViewNews& news() const { return news_; }

  // Nothing of this memory is sent or written any more, so transports forget it.
  void forget_memory(std::uint64_t identity);

 private:
  // Throws where nothing can begin, and notes that failure.
  void require_alive(const Tensor& tensor, tensor::OperationKind kind);
  std::shared_ptr<Operation> make_operation(const std::shared_ptr<Tensor>& tensor, const Request& request,
                                            std::uint32_t round, std::uint64_t sequence,
                                            std::span<const Begun> only = {},
                                            std::shared_ptr<const Plans> plans = nullptr);
  void fail_at_once(const std::shared_ptr<Operation>& operation, const Error& why);
  void launch(const std::shared_ptr<Operation>& operation, bool awaited);
  // Tells that it has failed, and all loops but `except`, which has done what follows.
  void cancel(const std::shared_ptr<Operation>& operation, const WorkerLoop* except);

  WorkerOptions options_;
  WorkerLoops loops_;
  const std::shared_ptr<FlightRecorder> recorder_ = std::make_shared<FlightRecorder>();
  const std::shared_ptr<ViewEnd> view_end_ = std::make_shared<ViewEnd>();
  Planner planner_;
  Declarations declarations_;
  ViewNews news_;
  std::atomic<std::uint64_t> sequence_{0};
  FailedOperations failed_;
  std::atomic<bool> has_one_phase_{false};  // an operation was started that has no second one
};

}  // namespace bps::worker
