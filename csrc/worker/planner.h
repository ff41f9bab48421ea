// SPDX-License-Identifier: Apache-2.0
// Decides which place sums each partition of a tensor, for each of its rounds, and makes the connections that this
// needs.
//
// Threading: set-up ends before the first tensor is declared; the van's thread begins and ends shifts; any thread may
// call the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "van/van.h"
#include "worker/late_connections.h"
#include "worker/places.h"
#include "worker/shifts.h"
#include "worker/worker_options.h"

namespace bps::worker {

class Planner {
 public:
  // Both must outlive it.
  Planner(const WorkerOptions& options, const van::Van& van);

  // ---- Set-up
  // Adds the next worker loop, which is connected to these places.
  void add_loop(std::span<const std::size_t> connected);
  // Takes the function that makes more connections. Groups other than all ranks may need them, when a tensor is
  // declared.
  void connect_by(LateConnections::Connect connect) { late_connections_.connect_by(std::move(connect)); }

  const Places& places() const { return places_; }  // those of the start
  // Plans a tensor whose servers have this load already. Blocks while a connection is made, and throws what connecting
  // throws.
  Plans make(const Tensor& tensor, const Places& places, std::span<const std::uint64_t> load);
  // Returns the plans of a round that has got its number, or null where they are the tensor's own. Blocks while a shift
  // is open.
  std::shared_ptr<const Plans> of_round(Tensor& tensor, const Request& request, std::uint32_t round);
  // Returns how much of these tensors each server sums now.
  Deal deal(std::span<const std::shared_ptr<Tensor>> tensors) const;
  // Returns the members, with the links that the weights of servers follow now.
  van::Membership membership() const;

  // ---- Servers get other weights; for the van's thread, but any thread may call stop_shifts()
  // Makes rounds that get their numbers from now on wait until the shift ends.
  void begin_shift() { shifts_.begin(); }
  // Returns the next rounds of these tensors, as far as the shift concerns them.
  std::vector<van::TensorRound> next_rounds(std::span<const std::shared_ptr<Tensor>> tensors);
  void end_shift(const van::EndShift& shift);
  // Lets rounds that wait go on, because nobody decides about the shift any more.
  void stop_shifts() { shifts_.stop(); }

 private:
  const WorkerOptions& options_;
  const van::Van& van_;
  const Places places_;
  std::size_t loops_ = 0;
  LateConnections late_connections_;
  Shifts shifts_;
  mutable std::mutex mutex_;
  std::vector<std::uint64_t> links_;  // by node, in bytes per second, since the last shift; guarded by mutex_
};

}  // namespace bps::worker
