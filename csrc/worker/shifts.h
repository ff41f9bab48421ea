// SPDX-License-Identifier: Apache-2.0
// Tells which placement a round of a tensor has, on a worker, when the weights of servers change while the job runs.
// van/shift.h tells how all ranks agree on that.
//
// Until the first shift a tensor has the plans that it was declared with. Rounds that are open have the latest
// placement or the one before. A worker knows one more, for a thread that sleeps between the number of its round and
// its plans. What servers and relays keep from round to round does not move: stored tensors, and those with error
// feedback or momentum, always have the first placement. Which rank of a host remembers a partition depends on its
// server.
//
// Threading: begin(), call_off() and end() belong to the van's thread; any thread may ask for plans.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "van/messages.h"
#include "worker/places.h"
#include "worker/request.h"
#include "worker/tensor.h"

namespace bps::worker {

class Shifts {
 public:
  using Make = std::function<std::shared_ptr<const Plans>(std::uint32_t shift, const Places& places)>;

  // Returns true while no round can be concerned, because no shift was ever begun. To be asked after a round has got
  // its number.
  bool is_at_rest() const { return state_.load() == 0; }

  // ---- From the van's thread
  // Makes rounds that get their numbers from now on wait. The scheduler is to be told those that have theirs.
  void begin();
  void call_off();
  // `from` has the first rounds with the new placement, for the tensors that have begun any.
  void end(std::shared_ptr<const Places> places, std::span<const van::TensorRound> from);
  // Lets what waits go on, and fail for its own reason, because nobody decides any more.
  void stop();

  // Returns the plans of a round, or null where they are the tensor's own. `make` is called without a lock. Blocks
  // while a shift is open: for a message to the scheduler and back, or until the scheduler calls it off, or counts as
  // lost.
  std::shared_ptr<const Plans> plans_of(Tensor& tensor, const Request& request, std::uint32_t round, const Make& make);
  // Returns true when the latest placement is that of later rounds.
  bool is_early(const Tensor& tensor, std::uint32_t round);
  // Returns the latest placement, or null where it is that of the worker.
  std::shared_ptr<const Places> latest() const {
    const std::lock_guard lock(mutex_);
    return known_.front().places;
  }
  std::uint32_t done() const { return state_.load() / 2; }

 private:
  static constexpr std::uint32_t kOpen = 1;

  struct Placement {
    std::shared_ptr<const Places> places;         // null: the worker's own
    std::map<std::uint64_t, std::uint32_t> from;  // the first round of each tensor, by van::TensorRound::key()
  };

  std::atomic<std::uint32_t> state_{0};  // twice the shifts that are done, plus 1 while one is open
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // ---- Guarded by mutex_
  bool stopped_ = false;
  std::array<Placement, Tensor::kShifts> known_;  // the latest one first
};

}  // namespace bps::worker
