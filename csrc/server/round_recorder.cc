// SPDX-License-Identifier: Apache-2.0
#include "server/round_recorder.h"

#include <algorithm>
#include <utility>

namespace bps::server {
namespace {

constexpr std::uint32_t high(std::uint64_t both) {
  return static_cast<std::uint32_t>(both >> 32);
}
constexpr std::uint32_t low(std::uint64_t both) {
  return static_cast<std::uint32_t>(both);
}

}  // namespace

std::vector<RoundRecorder::Record> RoundRecorder::list() const {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  std::vector<std::pair<std::uint64_t, Record>> found;
  for (const Entry& entry : ring_) {
    const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
    if (sequence == kUnused || sequence == kBusy) continue;
    const std::uint64_t tensor = entry.group_and_tensor.load(kRelaxed);
    const std::uint64_t round = entry.partition_and_number.load(kRelaxed);
    const std::uint64_t flags = entry.rank_and_flags.load(kRelaxed);
    const Record record{.key = {high(tensor), low(tensor), high(round), (flags & kForHost) != 0},
                        .number = low(round),
                        .last_rank = high(flags),
                        .failed = (flags & kFailed) != 0,
                        .bytes = entry.bytes.load(kRelaxed),
                        .opened = entry.opened.load(kRelaxed),
                        .summed = entry.summed.load(kRelaxed),
                        .ended = entry.ended.load(kRelaxed)};
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.sequence.load(kRelaxed) == sequence) found.emplace_back(sequence, record);
  }
  std::ranges::sort(found, {}, &std::pair<std::uint64_t, Record>::first);
  std::vector<Record> records;
  for (const auto& [sequence, record] : found) records.push_back(record);
  return records;
}

}  // namespace bps::server
