// SPDX-License-Identifier: Apache-2.0
// An operation is one call of the user on one tensor, from start() to the last partition's answer. A handle in Python
// is a reference to one.
//
// Threading: the calling thread makes it, and the worker loops then work on it; they meet in `remaining` and
// `completion`. The caller is woken once per operation, not per partition.
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
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/metrics.h"
#include "worker/completion.h"
#include "worker/device_arrays.h"
#include "worker/failure.h"
#include "worker/pace.h"
#include "worker/partition_layout.h"
#include "worker/portion.h"
#include "worker/request.h"
#include "worker/suspension.h"
#include "worker/tensor.h"

namespace bps::worker {

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // `only` makes it a continuation, of these partitions, in order; where it is empty it has all of them. `placed` are
  // the plans of its round, where these are not the tensor's own.
  Operation(std::shared_ptr<Tensor> declared, const Request& what, std::uint32_t number, std::uint64_t order,
            std::size_t worker_loops, std::size_t places, std::span<const Begun> only = {},
            std::shared_ptr<const Plans> placed = nullptr, Clock::time_point now = Clock::now());
  ~Operation();

  // Returns how many loops work on it.
  std::size_t shares(std::size_t worker_loops) const { return loop == kSeveral ? worker_loops : 1; }
  // Makes a complete operation pending again, as another round, with the same request and memory. It is only for an
  // operation that one loop works on. Returns false when a loop may still know of the last round; the next round then
  // needs another object.
  bool rearm(std::uint32_t new_round, std::uint64_t order);

  // These tell what has become of it: see completion.h.
  bool is_done() const { return completion.is_done(); }
  bool is_failing() const { return completion.is_failing(); }
  bool is_over() const { return completion.is_over(); }
  bool wait(const Deadline& until) const { return completion.wait(until); }
  bool wait_briefly(int milliseconds) const { return completion.wait_briefly(milliseconds); }
  // Throws the error with which the operation failed, if it failed.
  void rethrow() const;

  // Notes why it cannot complete. Returns true for the first reason, which counts. The caller must then see to it that
  // every loop cancels its part.
  bool fail(ErrorCode code, const std::string& what, const std::string& hint);
  // Adds what a server knows of the cause. Only the first explanation counts.
  void explain(const std::string& detail);
  // Returns the reason so far, or nothing.
  std::optional<Error> failure() const { return failure_.why(); }
  // Counts the operation, whose partitions are all over, and lets waiters see that. It may vanish at any moment then.
  void end(Counters& counters);

  // Returns true when the next view decides what becomes of it. It is then in two phases, and has failed because its
  // view has ended, or because of its deadline while the view's end keeps from this rank what became of it.
  bool is_suspended() const;
  // Returns the part of it that the next view is told of, and decides. It is made at first use.
  Suspension& suspension() const;
  // Fails it with the reason that another rank gives, because it was aborted in the next view.
  void abort_suspended(const Error& why);

  // Returns true for operations that add, if their tensor was declared with a compression. They are compressed on the
  // way to servers where compression pays.
  bool may_compress() const { return tensor->compressor && tensor->compressor->applies(request.kind, request.op); }
  std::uint64_t bytes() const { return tensor->bytes; }
  // Returns true while a device copies from the memory or to it. The caller must keep the memory so long.
  bool is_copied() const { return on_device && on_device->copies.load(std::memory_order_acquire) > 0; }
  // Returns the time since it was started, or nothing for an operation without a deadline.
  std::optional<Duration> age(Clock::time_point now) const;
  std::int64_t age_ms() const { return recording_.age_ms(); }  // 0 where its start was not recorded
  std::string describe() const;                                // "push_pull of 'name', round 3"

  const std::shared_ptr<Tensor> tensor;
  const std::shared_ptr<const Plans> plans;  // null: those of the tensor
  const Request request;
  bool is_watched = false;  // WatchedOperations of a loop has it; only that loop touches this
  // These three change from round to round: rearm().
  std::uint32_t round;
  std::uint64_t sequence;  // the number of the call, which decides between equal priorities
  Deadline deadline;
  const PartitionLayout layout;
  static constexpr std::size_t kSeveral = ~std::size_t{0};
  std::size_t loop = kSeveral;  // the only loop that works on it, if its partitions belong to one loop
  const std::unique_ptr<const Continuation> continuation;  // null: it continues no operation of an earlier view
  std::unique_ptr<DeviceArrays> on_device;                 // null: its memory is the host's
  Completion completion;
  std::atomic<std::uint64_t> remaining;
  std::vector<Portion> portions;  // [loop * places + place]
  std::unique_ptr<Pace[]> paces;  // by loop; null where the operation needs no pace

 private:
  std::size_t find_loop(std::size_t places) const;
  void begin(std::uint64_t shares, Clock::time_point now);
  tensor::PushHeader make_header() const;

  tensor::PushHeader header_;  // the header of all its pushes, without what the sender adds
  FlightRecorder::Recording recording_;
  Failure failure_;
  mutable std::atomic<Suspension*> suspension_{nullptr};  // owned; most operations never have one
};

// Notes that `count` partitions of an operation are over. Each loop counts one more, when it has admitted the
// operation. The last of them ends the operation, which may vanish at any moment then.
inline void finish(Operation& operation, std::uint64_t count, Counters& counters) {
  if (operation.remaining.fetch_sub(count, std::memory_order_acq_rel) == count) operation.end(counters);
}

// This is here so that loops inline it.
inline tensor::Extent Portion::extent_of(const Part& part) const {
  tensor::Extent extent = operation->layout.extent_of(part.partition);
  if (is_encoded(route) && !part.for_host()) operation->tensor->compressor->apply(extent);
  return extent;
}

}  // namespace bps::worker
