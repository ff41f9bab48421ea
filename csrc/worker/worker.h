// SPDX-License-Identifier: Apache-2.0
// A worker starts operations, and aborts those that a lost peer had a part in.
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

class Worker {
 public:
  Worker(WorkerOptions options, van::Van& van);

  // ---- Set-up
  // Adds each worker loop, in order, with the places (places.h) that it is connected to; both outlive the worker's last
  // operation.
  void add_loop(WorkerLoop* worker_loop, std::span<const std::size_t> connected);
  // Makes partitions have at most so many bytes. To be called before there are tensors.
  void limit_partitions(std::uint64_t bytes) { options_.cut.limit(bytes); }
  // Is called, from any thread, when an operation has failed, except by the end of the job or of its view.
  std::function<void()> on_failure;

  Planner& planner() { return planner_; }
  const Planner& planner() const { return planner_; }
  Declarations& declarations() { return declarations_; }
  // Returns what each server sums of the tensors that this rank has declared.
  Deal deal() const { return planner_.deal(declarations_.all()); }

  // Starts the next round of a tensor, or, for an addition to stored weights, of this rank's own copy of it. Blocks
  // while a loop's ring is full, or servers get other weights. Throws kInvalidArgument, kMismatch, kPeerLost, kTimeout.
  // Where `wakes` is false, the caller wakes the one loop of the operation, if it has one, once it has started others.
  std::shared_ptr<Operation> start(const std::shared_ptr<Tensor>& declared, const Request& request,
                                   const DeviceMemory& memory = {}, bool wakes = true);
  // Starts a prepared operation once more; Request explains `awaited`. Throws kInvalidArgument while it is in progress.
  void start(PreparedOperation& prepared, bool awaited);

  // Aborts an operation for all ranks. It is done when its memory is the caller's again.
  void abort(const std::shared_ptr<Operation>& operation, ErrorCode code, const std::string& what,
             const std::string& hint);
  // Aborts all operations, and waits until none is under way any more. Returns false at the deadline. Later ones are
  // refused.
  bool end_operations(ErrorCode code, const std::string& what, const std::string& hint, const Deadline& deadline);
  // Returns true where operations are in two phases if they can be.
  bool survives_servers() const { return options_.survives_servers; }
  // Returns true when the ranks can make good all that a loss of servers leaves behind, because no operation was
  // started that cannot be in two phases. Those with compression, on weights that servers keep, and by push() and
  // pull() apart cannot.
  bool can_go_on() const { return options_.survives_servers && !has_one_phase_.load(); }
  // Takes the operations in two phases that the end of the view has aborted, and the last of those that were not
  // complete at their deadlines. Once the loops are down, those that are suspended can go on in the next view, if it
  // has the same workers.
  std::vector<std::shared_ptr<Operation>> take_incomplete() { return failed_.take_incomplete(); }
  // Goes on with a suspended operation, or with some of its partitions (in order), as this round of a tensor of the new
  // view.
  std::shared_ptr<Operation> resume(const std::shared_ptr<Tensor>& tensor, const Operation& suspended,
                                    std::uint32_t round, std::span<const std::uint32_t> only);
  // Goes on without an operation that has failed at its deadline. A rank that comes to this round fails at once, and
  // does not wait.
  void refuse(const std::shared_ptr<Tensor>& tensor, const Operation& late, std::uint32_t round,
              const std::string& why);

  // Returns the last operations, at most `most`, for people.
  std::vector<FlightRecorder::Record> recent(std::size_t most) const { return recorder_->list(most); }
  // Returns how the last operation failed, or why it could not be started, or "" if one was started since.
  std::string last_failure() const { return failed_.last(sequence_.load()); }

  // The van tells its news to this.
  ViewNews& news() { return news_; }
  const ViewNews& news() const { return news_; }

  // Lets transports forget a block of memory, of which nothing is sent or written any more.
  void forget_memory(std::uint64_t identity);

 private:
  // Throws where nothing can begin, and notes that failure.
  void require_alive(const Tensor& tensor, tensor::OperationKind kind);
  std::shared_ptr<Operation> make_operation(const std::shared_ptr<Tensor>& tensor, const Request& request,
                                            std::uint32_t round, std::uint64_t sequence,
                                            std::span<const Begun> only = {},
                                            std::shared_ptr<const Plans> plans = nullptr);
  void launch(const std::shared_ptr<Operation>& operation, bool awaited, bool wakes = true);
  // Tells people and all loops that an operation has failed. The loop `except` has found that, and has cancelled its
  // part.
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
  std::atomic<bool> has_one_phase_{false};  // an operation was started that cannot be in two phases
};

}  // namespace bps::worker
