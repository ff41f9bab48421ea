// SPDX-License-Identifier: Apache-2.0
// Makes the connections of worker loops that are not made at the start. Groups other than all ranks may need them, when
// a tensor is declared. Any thread may call it; one connects at a time, and those that wait for it can be interrupted.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "worker/tensor.h"

namespace bps::worker {

class LateConnections {
 public:
  // Makes a connection of a worker loop to a place that it lacks. Blocks; throws what connecting throws.
  using Connect = std::function<void(std::size_t worker_loop, std::size_t place)>;

  explicit LateConnections(std::size_t places) : places_(places) {}

  // ---- Set-up
  void connect_by(Connect connect) { connect_ = std::move(connect); }
  // Adds the next worker loop, which has these connections.
  void add_loop(std::span<const std::size_t> connected) {
    const std::size_t first = connected_.size();
    connected_.resize(first + places_);
    for (const std::size_t place : connected) connected_[first + place] = true;
  }

  // Makes the connections that a plan needs.
  void make(const Plan& plan);

 private:
  const std::size_t places_;
  Connect connect_;
  std::mutex mutex_;  // held for moments only; the thread that connects sets is_connecting_
  std::condition_variable changed_;
  bool is_connecting_ = false;   // guarded by mutex_
  std::vector<bool> connected_;  // by [loop * places + place]; for the thread that connects
};

}  // namespace bps::worker
