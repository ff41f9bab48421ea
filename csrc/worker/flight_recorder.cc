// SPDX-License-Identifier: Apache-2.0
#include "worker/flight_recorder.h"

#include <algorithm>

namespace bps::worker {

std::vector<FlightRecorder::Record> FlightRecorder::list(std::size_t most) const {
  const auto now = Clock::now();
  const auto time_of = [](Clock::rep ticks) { return Clock::time_point(Clock::duration(ticks)); };
  std::vector<Record> found;
  for (const Entry& entry : ring_) {
    const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
    if (sequence == kUnused) continue;
    const End end = entry.end.load(std::memory_order_acquire);
    const auto began = time_of(entry.began.load(std::memory_order_relaxed));
    const auto ended = time_of(entry.ended.load(std::memory_order_relaxed));
    Record record{.sequence = sequence,
                  .tensor = entry.tensor.load(std::memory_order_relaxed),
                  .kind = entry.kind.load(std::memory_order_relaxed),
                  .round = entry.round.load(std::memory_order_relaxed),
                  .end = end,
                  .age_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - began).count(),
                  .duration_us = -1};
    if (end != End::kNone) {
      record.duration_us = std::chrono::duration_cast<std::chrono::microseconds>(ended - began).count();
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.sequence.load(std::memory_order_relaxed) == sequence) found.push_back(record);
  }
  std::ranges::sort(found, {}, &Record::sequence);
  if (found.size() > most) found.erase(found.begin(), found.end() - static_cast<std::ptrdiff_t>(most));
  return found;
}

}  // namespace bps::worker
