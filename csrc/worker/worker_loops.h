// SPDX-License-Identifier: Apache-2.0
// Holds the worker loops of a process. They share the work on an operation, if it is more than one loop's. The first
// loop that gets it watches its deadline, and keeps it alive.
//
// add() is to be called before there are operations. Any thread may call the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "worker/operation.h"
#include "worker/worker_loop.h"

namespace bps::worker {

class WorkerLoops {
 public:
  void add(WorkerLoop* loop) {
    loops_.push_back(loop);
    ended_before_ += ended_by(*loop);
  }
  std::size_t count() const { return loops_.size(); }
  const std::vector<WorkerLoop*>& all() const { return loops_; }
  // Returns the loop that gets the operation first.
  WorkerLoop& first_of(const Operation& operation) const {
    const bool is_shared = operation.loop == Operation::kSeveral;
    return *loops_[is_shared ? operation.sequence % loops_.size() : operation.loop];
  }

  // Hands an operation to its loops, and wakes them, but not the only loop of an operation if it is `driven`: its
  // caller works for that loop, or wakes it. Blocks while a loop's ring is full. Throws kTimeout when no loop has it.
  // When other loops have it already, `abort` is told why, and must abort it.
  template <typename Abort>
  void submit(const std::shared_ptr<Operation>& operation, bool driven, const Abort& abort) const;
  // Returns true when so many operations have ended since the loops were added. If so many were started, all have
  // ended.
  bool have_ended(std::uint64_t operations) const {
    std::uint64_t ended = 0;
    for (WorkerLoop* each : loops_) ended += ended_by(*each);
    return ended - ended_before_ >= operations;
  }
  void wake() const {
    for (WorkerLoop* each : loops_) each->reactor().progress()->wake();
  }
  // Makes the call in each loop but `except`, on the loop's own thread, at some time.
  template <typename Call>
  void tell(const Call& call, const WorkerLoop* except = nullptr) const {
    for (WorkerLoop* each : loops_) {
      if (each != except) each->reactor().loop().post([=] { call(*each); });
    }
  }
  // Ends so many shares of an operation, for loops that will never have it, on the thread of its first loop.
  void forgo(std::shared_ptr<Operation> operation, std::uint64_t shares) const {
    transport::Reactor& reactor = first_of(*operation).reactor();
    reactor.loop().post(
        [operation = std::move(operation), shares, &reactor] { finish(*operation, shares, reactor.counters()); });
  }

 private:
  static std::uint64_t ended_by(WorkerLoop& loop) {
    const Counters& counters = loop.reactor().counters();
    return counters.operations.get() + counters.failed.get();
  }

  std::vector<WorkerLoop*> loops_;
  std::uint64_t ended_before_ = 0;
};

template <typename Abort>
void WorkerLoops::submit(const std::shared_ptr<Operation>& operation, bool driven, const Abort& abort) const {
  WorkerLoop& first = first_of(*operation);
  first.submit(operation, true);
  if (operation->loop != Operation::kSeveral) {
    if (!driven) operation->completion.progress->wake();
    return;
  }
  std::uint64_t left = loops_.size() - 1;
  for (WorkerLoop* each : loops_) {
    if (each == &first) continue;
    try {
      each->submit(operation, false);
    } catch (const Error& error) {
      // This loop and those after it cancel their parts without having admitted them.
      abort(error);
      forgo(operation, left);
      break;
    }
    --left;
  }
  wake();
}

}  // namespace bps::worker
