// SPDX-License-Identifier: Apache-2.0
// One call of the user on one tensor, from start() to the last partition's answer. The handle of Python is a reference
// to one of these.
//
// Threading: made by the calling thread, then worked on by the worker loops; `remaining` and `completion` are the
// meeting points. The caller is woken once per operation, not per partition.
//
// An operation ends in one of two ways: complete, or aborted for all ranks. fail() only notes the reason; the loops
// then cancel what the servers hold of it, and the caller learns of the failure when every server has acknowledged
// that, or can write no more. From then on nobody touches the caller's memory.
//
// A prepared operation is one that rearm() makes pending again for each call, so that a call allocates nothing.
#pragma once

#include <array>
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
#include "worker/failure.h"
#include "worker/pace.h"
#include "worker/partition_layout.h"
#include "worker/portion.h"
#include "worker/request.h"
#include "worker/suspension.h"
#include "worker/tensor.h"

namespace bps::worker {

// An operation on a device's memory has these besides.
struct DeviceArrays {
  explicit DeviceArrays(device::Device& of) : device(of) {}
  device::Device& device;
  std::array<device::Ready, 2> ready{};  // points that the device has to reach before it uses the memory
  std::atomic<std::uint32_t> copies{0};  // that have not ended; those from the memory, perhaps even after the operation
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // `only`: a continuation, of these partitions, in order; empty: all of them.
  // `placed`: the plans of its round, where these are not the tensor's own.
  Operation(std::shared_ptr<Tensor> declared, const Request& what, std::uint32_t number, std::uint64_t order,
            std::size_t worker_loops, std::size_t places, std::span<const Begun> only = {},
            std::shared_ptr<const Plans> placed = nullptr, Clock::time_point now = Clock::now());
  ~Operation();

  // How many loops work on it.
  std::size_t shares(std::size_t worker_loops) const { return loop == kSeveral ? worker_loops : 1; }
  // Makes a complete operation pending again, as another round, with the same request and memory. Only for an operation
  // that one loop works on. False when a loop may still know of the last round, which then needs another object.
  bool rearm(std::uint32_t new_round, std::uint64_t order);

  // These tell what has become of it: see completion.h.
  bool is_done() const { return completion.is_done(); }
  bool is_failing() const { return completion.is_failing(); }
  bool is_over() const { return completion.is_over(); }
  bool wait(const Deadline& until) const { return completion.wait(until); }
  bool wait_briefly(int milliseconds) const { return completion.wait_briefly(milliseconds); }
  // Throws what it failed with; returns when it is well.
  void rethrow() const;

  // Notes why it cannot complete. True for the first reason, which counts; the caller must then see to it that every
  // loop cancels its part.
  bool fail(ErrorCode code, const std::string& what, const std::string& hint);
  // Adds what a server knows of the cause; the first one counts.
  void explain(const std::string& detail);
  // The reason so far, or nothing.
  std::optional<Error> failure() const { return failure_.why(); }
  // All partitions are over: counts the operation, and lets waiters see that. It may vanish at any moment then.
  void end(Counters& counters);

  // True when the next view decides what becomes of it. It is in two phases, and has failed because its view has ended,
  // or because of its deadline while the view's end keeps from this rank what became of it.
  bool is_suspended() const;
  // The part of it that the next view is told of, and decides. It is made at first use.
  Suspension& suspension() const;
  // It was aborted in the next view, with the reason that another rank gives.
  void abort_suspended(const Error& why);

  // Operations that add are compressed if their tensor was declared so, on the way to servers where compression pays.
  bool may_compress() const { return tensor->compressor && tensor->compressor->applies(request.kind, request.op); }
  std::uint64_t bytes() const { return tensor->bytes; }
  // True while a device copies from the memory or to it: the caller must keep it.
  bool is_copied() const { return on_device && on_device->copies.load(std::memory_order_acquire) > 0; }
  // The time since it was started; an operation without a deadline has none.
  std::optional<Duration> age(Clock::time_point now) const;
  std::int64_t age_ms() const { return recording_.age_ms(); }  // as far as its start is recorded
  std::string describe() const;                                // "push_pull of 'name', round 3"

  const std::shared_ptr<Tensor> tensor;
  const std::shared_ptr<const Plans> plans;  // null: those of the tensor
  const Request request;
  bool is_watched = false;  // WatchedOperations has it; of the loop that watches its deadline
  // These three change from round to round: rearm().
  std::uint32_t round;
  std::uint64_t sequence;  // order of the calls, for equal priorities
  Deadline deadline;
  const PartitionLayout layout;
  static constexpr std::size_t kSeveral = ~std::size_t{0};
  std::size_t loop = kSeveral;  // the only one that works on it, if its partitions belong to one
  const std::unique_ptr<const Continuation> continuation;  // of an operation of an earlier view, or null
  std::unique_ptr<DeviceArrays> on_device;                 // null: its memory is the host's
  Completion completion;
  std::atomic<std::uint64_t> remaining;
  std::vector<Portion> portions;  // [loop * places + place]
  std::unique_ptr<Pace[]> paces;  // [loop], where more partitions than one server may have under way could need one

 private:
  std::size_t find_loop(std::size_t places) const;
  void begin(std::uint64_t shares, Clock::time_point now);
  tensor::PushHeader make_header() const;

  tensor::PushHeader header_;  // of all its pushes
  FlightRecorder::Recording recording_;
  Failure failure_;
  mutable std::atomic<Suspension*> suspension_{nullptr};  // owned; most operations never have one
};

// `count` partitions of an operation are over, or what a loop owes it besides: having admitted it. The last one ends
// the operation, which may vanish at any moment then.
inline void finish(Operation& operation, std::uint64_t count, Counters& counters) {
  if (operation.remaining.fetch_sub(count, std::memory_order_acq_rel) == count) operation.end(counters);
}

// Here, so that loops inline it.
inline tensor::Extent Portion::extent_of(const Part& part) const {
  tensor::Extent extent = operation->layout.extent_of(part.partition);
  if (route == Route::kEncoded && !part.for_host()) operation->tensor->compressor->apply(extent);
  return extent;
}

}  // namespace bps::worker
