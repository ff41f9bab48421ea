// SPDX-License-Identifier: Apache-2.0
#include "van/barrier_state.h"

#include <algorithm>

namespace bps::van {

std::vector<BarrierState::Caller> BarrierState::arrive(Caller caller) {
  const auto place = std::ranges::lower_bound(ranks_, caller.rank) - ranks_.begin();
  waiting_[static_cast<std::size_t>(place)].push_back(caller.call);
  if (std::ranges::any_of(waiting_, [](const auto& calls) { return calls.empty(); })) return {};
  std::vector<Caller> released;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    released.push_back({ranks_[i], waiting_[i].front()});
    waiting_[i].pop_front();
  }
  return released;
}

std::optional<std::vector<std::uint32_t>> BarrierState::cancel(Caller caller) {
  const auto rank = std::ranges::lower_bound(ranks_, caller.rank);
  if (rank == ranks_.end() || *rank != caller.rank) return std::nullopt;
  auto& calls = waiting_[static_cast<std::size_t>(rank - ranks_.begin())];
  const auto found = std::ranges::find(calls, caller.call);
  if (found == calls.end()) return std::nullopt;
  const auto place = static_cast<std::size_t>(found - calls.begin());
  calls.erase(found);
  std::vector<std::uint32_t> missing;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] != caller.rank && waiting_[i].size() <= place) missing.push_back(ranks_[i]);
  }
  return missing;
}

std::vector<BarrierState::Caller> BarrierState::cancel_all() {
  std::vector<Caller> callers;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    for (const std::uint32_t call : waiting_[i]) callers.push_back({ranks_[i], call});
    waiting_[i].clear();
  }
  return callers;
}

bool BarrierState::empty() const {
  return std::ranges::all_of(waiting_, [](const auto& calls) { return calls.empty(); });
}

std::size_t BarrierState::waiting(std::uint32_t rank) const {
  const auto found = std::ranges::lower_bound(ranks_, rank);
  if (found == ranks_.end() || *found != rank) return 0;
  return waiting_[static_cast<std::size_t>(found - ranks_.begin())].size();
}

}  // namespace bps::van
