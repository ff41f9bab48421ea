// SPDX-License-Identifier: Apache-2.0
// One call of the user on one tensor, from start() to the last partition's answer. The handle of Python is a reference
// to one of these.
//
// Threading: made by the calling thread, then worked on by the worker loops; `remaining` and `state` are the meeting
// points. The caller sleeps on `state` (a futex), and is woken once per operation, not per partition.
//
// An operation ends in one of two ways: complete, or aborted for all ranks. fail() only notes the reason; the loops
// then cancel what the servers hold of it, and the caller learns of the failure when every server has acknowledged
// that, or can write no more. From then on nobody touches the caller's memory.
//
// A prepared operation is one that rearm() makes pending again for each call, so that a call allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/metrics.h"
#include "tensor/placement.h"
#include "transport/progress.h"
#include "transport/region_cache.h"
#include "worker/tensor.h"
#include "worker/transfer.h"

namespace bps::worker {

const char* name_of(tensor::OperationKind kind);

struct Request {
  tensor::OperationKind kind = tensor::OperationKind::kPushPull;
  ReduceOp op = ReduceOp::kSum;
  bool pushes = true;  // kSplit: push() and pull() are two requests of one round
  bool pulls = true;
  std::uint32_t root = 0;                  // place in the group; kBroadcast, kStore
  tensor::Addition addition{};             // kAccumulate; with `again`, its tries are counted by the worker
  bool again = false;                      // kAccumulate: the latest addition, whatever servers have of it
  std::byte* input = nullptr;              // kReduceScatter: the whole tensor; kAllGather: the own shard
  std::byte* output = nullptr;             // kReduceScatter: the own shard; kAllGather: the whole tensor
  transport::Allocation input_allocation;  // the blocks around them, which are registered
  transport::Allocation output_allocation;
  std::int32_t priority = 0;  // higher first
  double timeout_s = 300;
  // A lost server then costs nothing: see tensor::kTwoPhase. kSplit cannot have it, because its push is over before its
  // round is.
  bool two_phase = false;
  bool awaited = false;  // its caller waits next, and then works itself: nobody needs to be woken
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  enum State : std::uint32_t { kPending = 0, kDone = 1, kFailed = 2 };

  // A portion is what one loop sends to one server. It belongs to that loop.
  class Portion final : public Transfer {
   public:
    tensor::Placement place(const Part& part) const override {
      tensor::Placement placement = tensor::place(operation->placed, operation->cut(), part.partition);
      if (route == Route::kEncoded && !part.for_host()) operation->tensor->compressor->apply(placement);
      return placement;
    }
    Status fill(const Part& part, tensor::Placement& placement, std::byte* into, Counters& counters) override;
    Status take_answer(const Part& part, const tensor::Placement& placement, const std::byte* from,
                       Counters& counters) override;
    bool fail(ErrorCode code, const std::string& what, const std::string& hint) override {
      return operation->fail(code, what, hint);
    }
    void note_missing(const std::string& server, const std::vector<std::uint32_t>& ranks) override;
    tensor::Cancel make_cancel() const override;
    bool suspend(std::uint32_t partition, const Landed& landed, bool failed) override;
    void finish(std::uint32_t count, bool answered, Counters& counters) override;

   private:
    // Whether a server, or a NIC, may have written to the caller's memory.
    bool lies_in_place() const { return route == Route::kInPlace || route == Route::kStagedIfCheap; }
    void release_memory();
  };

  // A partition that has not been committed in a view that has ended. Where its result has not landed, the input is as
  // it was.
  struct Unfinished {
    std::uint32_t partition;
    Landed landed;
  };
  // A partition of which this rank has the first bytes of the result, where it belongs.
  struct Begun {
    std::uint32_t partition;
    std::uint64_t bytes;
  };

  // `only`: a continuation, of these partitions, in order; empty: all of them.
  Operation(std::shared_ptr<Tensor> tensor, const Request& request, std::uint32_t round, std::uint64_t sequence,
            std::size_t worker_loops, std::size_t places, std::span<const Begun> only = {},
            Clock::time_point now = Clock::now());

  ~Operation();

  // Makes a complete operation pending again, as another round, with the same request and memory. Only for an operation
  // that one loop works on. False when a loop may still know of the last round, which then needs another object.
  bool rearm(std::uint32_t new_round, std::uint64_t order);

  // It is complete, or aborted: the memory is the caller's again.
  bool done() const { return state_.load(std::memory_order_acquire) != kPending; }
  // Something has failed, and what is left of it is being cancelled.
  bool is_failing() const { return failing_.load(std::memory_order_acquire); }
  // Nobody in the worker loops will touch this object again.
  bool over() const { return over_.load(std::memory_order_acquire); }
  // Waits until done or the deadline; false at the deadline. Works in the loop's stead as long as that is of use.
  bool wait(const Deadline& deadline) const;
  // The same without looking at the clock; may return early, with false.
  bool wait_briefly(int milliseconds) const;
  // Throws what it failed with; returns when it is well.
  void rethrow() const;

  // The caller waits no longer: the operation is aborted when the loop looks at the deadlines next. Any thread may call
  // this.
  void give_up() { given_up_.store(true, std::memory_order_relaxed); }
  bool is_given_up() const { return given_up_.load(std::memory_order_relaxed); }
  // Notes why it cannot complete. True for the first reason, which counts; the caller must then see to it that every
  // loop cancels its part.
  bool fail(ErrorCode code, const std::string& what, const std::string& hint);
  // Adds what a server knows of the cause; the first one counts.
  void explain(const std::string& detail);
  // The reason so far, or nothing.
  std::optional<Error> failure() const;
  // Operations that add float32 elements are compressed if their tensor was declared so, on the way to servers where
  // compression pays.
  bool may_compress() const { return tensor->compressor && Compressor::applies(request.kind, request.op); }
  // A partition has ended without its answer. An operation whose answers all came is complete even if it was failing.
  void mark_incomplete() { special_.fetch_or(kIncomplete, std::memory_order_relaxed); }
  // Its result went to pages that the process has given back meanwhile. So it fails when it is over, on this rank only.
  void mark_given_back() { special_.fetch_or(kIncomplete | kGivenBack, std::memory_order_relaxed); }
  bool is_incomplete() const { return (special_.load(std::memory_order_relaxed) & kIncomplete) != 0; }
  bool is_timed() const { return (special_.load(std::memory_order_relaxed) & kTimed) != 0; }
  // The time since it was started; an operation without a deadline has none.
  std::optional<Duration> age(Clock::time_point now) const;
  // The operation is complete, and timed.
  void note_time(Duration age, Counters& counters) const;
  // `count` partitions are over; true with the last of them, after which the caller must end() it.
  bool finish(std::uint64_t count) { return remaining.fetch_sub(count, std::memory_order_acq_rel) == count; }
  // Lets waiters see that it is over. After this the operation may vanish at any moment.
  void end();
  // Readable (eventfd) once done, for event loops; made at first use.
  int completion_fd();

  // In two phases, once it has failed because its view has ended, or because of its deadline while the view's end keeps
  // from this rank what became of it: what the next view makes of it.
  bool is_suspended() const;
  std::vector<Unfinished> unfinished() const;
  // The partitions whose result this rank wants, in order, and how much of it has come: those that it lacks at least a
  // part of, and those that it has. Of the others it hears only that they are over, perhaps never: those that want them
  // decide.
  std::vector<Begun> missing() const { return wanted(false); }
  std::vector<Begun> whole() const { return wanted(true); }
  // How much of the results of these partitions is where it belongs.
  std::vector<Begun> begun(std::span<const std::uint32_t> partitions) const;
  // The first bytes of the result of a partition, for those who lack them, and from one who has them.
  void read(std::uint32_t partition, std::span<std::byte> into) const;
  void write(std::uint32_t partition, std::span<const std::byte> from);
  // Takes the results that have landed in buffers. Nobody lacks them: they have been given.
  void take_landed();
  // A continuation sums again what has not been committed in an earlier view.
  bool is_continuation() const { return (special_.load(std::memory_order_relaxed) & kContinuation) != 0; }

  // This is what became of the operation there.
  enum class Resumption : std::uint8_t {
    kNone,       // that is not known yet
    kContinued,  // by another operation
    kComplete,
    kAborted,  // the next view has other workers, or it has failed on another rank
  };
  void resolve(Resumption how, std::shared_ptr<Operation> by = nullptr);
  // Aborted, with the reason that another rank gives.
  void resolve(const Error& failure);
  Resumption resumption(std::shared_ptr<Operation>* by = nullptr) const;

  std::int64_t age_ms() const;   // since it began, as far as that is recorded
  std::string describe() const;  // "push_pull of 'name', round 3"

  const std::shared_ptr<Tensor> tensor;
  const Request request;
  // These three change from round to round: rearm().
  std::uint32_t round;
  std::uint64_t sequence;  // order of the calls, for equal priorities
  Deadline deadline;
  std::shared_ptr<transport::ProgressLock> progress;  // of the one loop that works on it; null when there are several
  const tensor::PlacementRequest placed;              // what decides where each partition lies
  const tensor::Partitioning& cut() const { return *cut_; }
  std::atomic<std::uint64_t> remaining;
  std::vector<Portion> portions;  // [loop * places + place]
  bool is_watched = false;        // WatchedOperations has it; of the loop that watches its deadline
  std::uint64_t bytes() const { return tensor->bytes; }

 private:
  void record(Clock::time_point now);
  void settle(State state);
  std::uint64_t begun(std::uint32_t partition) const;
  std::vector<Begun> wanted(bool whole) const;
  std::uint64_t start(Portion& portion) const;
  tensor::PushHeader make_header() const;

  const tensor::Partitioning* cut_;
  tensor::PushHeader header_;  // of all its pushes
  FlightRecorder::Entry* recorded_ = nullptr;
  Clock::time_point recorded_at_{};

  std::atomic<std::uint32_t> state_{kPending};
  std::atomic<bool> failing_{false};
  std::atomic<bool> given_up_{false};
  // One byte, so that one branch finds all of it absent.
  static constexpr std::uint8_t kIncomplete = 1;
  static constexpr std::uint8_t kTimed = 2;
  static constexpr std::uint8_t kContinuation = 4;
  static constexpr std::uint8_t kGivenBack = 8;
  std::atomic<std::uint8_t> special_;
  std::atomic<bool> over_{false};  // the last thing that a loop writes here
  mutable std::atomic<std::uint32_t> sleepers_{0};
  mutable std::mutex error_mutex_;  // failures only
  std::optional<Error> error_;
  bool explained_ = false;
  // Most operations never have one.
  struct Suspension {
    Plan plan;                 // of some partitions of the tensor: it continues an operation of an earlier view,
    std::vector<Begun> begun;  // whose results have begun to come, as far as this, and are not taken again
    std::vector<Unfinished> unfinished;
    bool has_failed = false;  // some partition of it, for all ranks
    Resumption resumption = Resumption::kNone;
    std::shared_ptr<Operation> continued_by;
  };
  Suspension& suspension() {
    if (!suspension_) suspension_ = std::make_unique<Suspension>();
    return *suspension_;
  }
  std::unique_ptr<Suspension> suspension_;
  std::atomic<int> completion_fd_{-1};
};

// `count` partitions of an operation are over, or what a loop owes it besides: having admitted it. The last one ends
// the operation, which may vanish at any moment then.
void finish(Operation& operation, std::uint64_t count, Counters& counters);

}  // namespace bps::worker
