// SPDX-License-Identifier: Apache-2.0
// Keeps the worker ranks that wait for each other, in a barrier or to form a group. It is a pure state machine.
//
// Each rank may have several callers waiting (threads); the n-th caller of one rank meets the n-th callers of the
// others.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace bps::van {

class BarrierState {
 public:
  struct Caller {
    std::uint32_t rank;
    std::uint32_t call;
    bool operator==(const Caller&) const = default;
  };

  static constexpr std::size_t kMostWaiting = 65536;  // callers of one rank, which cannot have more threads

  explicit BarrierState(std::vector<std::uint32_t> ranks) : ranks_(std::move(ranks)), waiting_(ranks_.size()) {}

  // Returns one caller of each rank when this one was the last, and nobody otherwise. Its rank must be one of the
  // ranks.
  std::vector<Caller> arrive(Caller caller);
  // Removes the caller and returns the ranks that it still waited for, or nothing where it does not wait here.
  std::optional<std::vector<std::uint32_t>> cancel(Caller caller);
  // Cancels every call and returns the callers.
  std::vector<Caller> cancel_all();
  bool empty() const;
  bool waits(std::uint32_t rank) const { return waiting(rank) > 0; }
  std::size_t waiting(std::uint32_t rank) const;  // how many callers of this rank wait
  const std::vector<std::uint32_t>& ranks() const { return ranks_; }

 private:
  std::vector<std::uint32_t> ranks_;  // ascending
  std::vector<std::deque<std::uint32_t>> waiting_;
};

}  // namespace bps::van
