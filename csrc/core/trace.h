// SPDX-License-Identifier: Apache-2.0
// Keeps what the loops note about each partition, and when. One thread reads it (trace_writer.h).
//
// A loop that is not traced has no ring, so that each place where something is noted costs one predictable branch. A
// full ring drops what comes, and counts that: nothing waits for the reader.
//
// record() and record_at() of a ring belong to the loop's thread, noted() and free() to the reader's, and dropped() to
// any.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/codec.h"
#include "core/counter.h"
#include "core/ring.h"
#include "core/tick_counter.h"

namespace bps {

enum class TraceStage : std::uint8_t {
  // On a worker
  kQueued,     // in the send queue of a server, or among what a GPU is to copy
  kOnDevice,   // a GPU has been told of it, and comes to the caller's call first
  kReached,    // the GPU has done what comes before its copy: the caller's kernels, and other copies
  kFetched,    // the GPU has copied it
  kStalled,    // at the head of the queue, and held up: see Counters::credit_stalls and pace_stalls
  kSent,       // handed to the transport
  kAnswered,   // its answer is here, and a GPU copies that to the caller's memory
  kLanded,     // its answer is in the caller's memory
  kAborted,    // it will have no answer
  kOperation,  // an operation is complete: TraceEvent::value is how long it took, in nanoseconds
  // On a server
  kPushed,   // a contribution has come
  kSummed,   // all contributions have come, and they are summed
  kReplied,  // all answers are on their way
};
constexpr bool is_valid(TraceStage stage) {
  return stage <= TraceStage::kReplied;
}

// Names a partition in a round. The partition of an operation is 0.
struct TraceKey {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  std::uint32_t partition = 0;
  bool for_host = false;  // summed by the relay of a host for its ranks

  bool operator==(const TraceKey&) const = default;
};

// Describes an event as it lies in the rings and in the file (trace_file.h): small, and with every byte named.
struct TraceEvent {
  std::uint64_t time = 0;   // TraceRing::now()
  std::uint64_t value = 0;  // bytes
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  std::uint32_t partition = 0;
  std::uint32_t peer = 0;  // on a worker: the node of the server; on a server: the rank that has pushed
  TraceStage stage = TraceStage::kQueued;
  std::uint8_t for_host = 0;
  std::uint16_t unused = 0;

  TraceKey key() const { return {group, tensor, round, partition, for_host != 0}; }
  static constexpr void fields(auto& io, auto& m) {
    io(m.time, m.value, m.group, m.tensor, m.round, m.partition, m.peer, m.stage, m.for_host, m.unused);
    io.require([&] { return m.for_host <= 1 && m.unused == 0; });
  }
};
static_assert(codec::Plain<TraceEvent> && sizeof(TraceEvent) == 40);

// Says what the program did meanwhile, in its own words: "forward", "wait". Times are those of now_ns().
struct TraceSpan {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint32_t name = 0;  // TraceWriter::record_span() numbers them
  std::uint32_t step = 0;

  static constexpr void fields(auto& io, auto& m) { io(m.begin, m.end, m.name, m.step); }
};
static_assert(codec::Plain<TraceSpan>);

// Tells which rounds are noted, the last one included.
struct TracedRounds {
  std::uint32_t first = 0;
  std::uint32_t last = ~std::uint32_t{0};

  bool contain(std::uint32_t round) const { return round >= first && round <= last; }
};

class TraceRing {
 public:
  // This is enough for a second at some ten thousand partitions, which is many.
  static constexpr std::size_t kEvents = 1 << 15;
  using Noted = std::array<std::span<const TraceEvent>, 2>;  // the second part is from the start of the memory

  // Times are those of tick_counter() if `by_counter`, else those of now_ns().
  explicit TraceRing(TracedRounds rounds, bool by_counter = false)
      : rounds_(rounds), by_counter_(by_counter), events_(kEvents) {}

  std::uint64_t now() const { return by_counter_ ? tick_counter() : now_ns(); }
  // Returns true when it is worth a look at the clock.
  bool wants(std::uint32_t round) const { return rounds_.contain(round); }
  void record(TraceStage stage, const TraceKey& key, std::uint32_t peer, std::uint64_t value) {
    if (wants(key.round)) add(now(), stage, key, peer, value);
  }
  // Does the same at a time by now() that is known already.
  void record_at(std::uint64_t time, TraceStage stage, const TraceKey& key, std::uint32_t peer, std::uint64_t value) {
    if (wants(key.round)) add(time, stage, key, peer, value);
  }

  Noted noted() const {
    const std::size_t head = head_.load(std::memory_order_relaxed);
    const std::size_t count = tail_.load(std::memory_order_acquire) - head;
    const std::size_t first = std::min(count, kEvents - head % kEvents);
    return {std::span(events_).subspan(head % kEvents, first), std::span(events_).first(count - first)};
  }
  // Frees the oldest ones, which have been read.
  void free(std::size_t count) {
    head_.store(head_.load(std::memory_order_relaxed) + count, std::memory_order_release);
  }
  std::uint64_t dropped() const { return dropped_.get(); }

 private:
  void add(std::uint64_t time, TraceStage stage, const TraceKey& key, std::uint32_t peer, std::uint64_t value) {
    const std::size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - seen_head_ == kEvents) {
      seen_head_ = head_.load(std::memory_order_acquire);
      if (tail - seen_head_ == kEvents) return dropped_.add();
    }
    events_[tail % kEvents] = {.time = time,
                               .value = value,
                               .group = key.group,
                               .tensor = key.tensor,
                               .round = key.round,
                               .partition = key.partition,
                               .peer = peer,
                               .stage = stage,
                               .for_host = key.for_host};
    tail_.store(tail + 1, std::memory_order_release);
  }

  const TracedRounds rounds_;
  const bool by_counter_;
  std::vector<TraceEvent> events_;
  alignas(kCacheLine) std::atomic<std::size_t> tail_{0};  // written by the loop
  std::size_t seen_head_ = 0;
  Counter dropped_;
  alignas(kCacheLine) std::atomic<std::size_t> head_{0};  // written by the reader
};

}  // namespace bps
