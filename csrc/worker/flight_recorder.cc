// SPDX-License-Identifier: Apache-2.0
#include "worker/flight_recorder.h"

#include <algorithm>

namespace bps::worker {

std::vector<FlightRecorder::Record> FlightRecorder::list(std::size_t most) const {
  const auto now = Clock::now();
  std::vector<Record> found;
  for (const Entry& entry : ring_) {
    const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
    if (sequence == kUnused || sequence == kBusy) continue;
    const std::uint64_t outcome = entry.outcome.load(std::memory_order_relaxed);
    const Clock::time_point began{Clock::duration(entry.began.load(std::memory_order_relaxed))};
    const End end = end_of(outcome);
    const Record record{.sequence = sequence,
                        .tensor = entry.tensor.load(std::memory_order_relaxed),
                        .kind = entry.kind.load(std::memory_order_relaxed),
                        .round = entry.round.load(std::memory_order_relaxed),
                        .end = end,
                        .age_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - began).count(),
                        .duration_us = end == End::kNone ? -1 : static_cast<std::int64_t>(outcome & kLongest)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.sequence.load(std::memory_order_relaxed) == sequence) found.push_back(record);
  }
  std::ranges::sort(found, {}, &Record::sequence);
  if (found.size() > most) found.erase(found.begin(), found.end() - static_cast<std::ptrdiff_t>(most));
  return found;
}

}  // namespace bps::worker
