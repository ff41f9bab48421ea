// SPDX-License-Identifier: Apache-2.0
// What happens to each partition, and when, noted by the loops where it happens and read by one thread
// (trace_writer.h).
//
// A loop that is not traced has no ring, so that each place where something is noted costs one predictable branch. A
// ring that is full drops what comes, and counts that: nothing waits for the reader.
//
// Threading: record() belongs to the loop's thread, pop() to the reader's; dropped() to any.
#pragma once

#include <cstdint>
#include <utility>

#include "core/clock.h"
#include "core/counter.h"
#include "core/ring.h"

namespace bps {

enum class TraceStage : std::uint8_t {
  // On a worker
  kQueued,     // in the send queue of a server
  kStalled,    // at its head, and held up by a lack of credits
  kSent,       // handed to the transport
  kLanded,     // its answer is in the caller's memory
  kAborted,    // it will have no answer
  kOperation,  // of an operation, which is complete: TraceEvent::value is how long it took, in nanoseconds
  // On a server
  kPushed,   // a contribution has come
  kSummed,   // all have, and they are summed
  kReplied,  // all answers are on their way
};

// A partition in a round. Of an operation the partition is 0.
struct TraceKey {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  std::uint32_t partition = 0;
  bool for_host = false;  // summed by the relay of a host for its ranks

  bool operator==(const TraceKey&) const = default;
};

struct TraceEvent {
  TraceKey key;
  TraceStage stage = TraceStage::kQueued;
  std::uint32_t peer = 0;   // on a worker: the node of the server; on a server: the rank that has pushed
  std::uint64_t time = 0;   // now_ns()
  std::uint64_t value = 0;  // bytes
};

// What the program did meanwhile, as it says itself: "forward", "wait". Times as in TraceEvent.
struct TraceSpan {
  std::uint32_t name = 0;  // TraceWriter::record_span() numbers them
  std::uint32_t step = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// The rounds to be noted, the last one included.
struct TracedRounds {
  std::uint32_t first = 0;
  std::uint32_t last = ~std::uint32_t{0};
};

class TraceRing {
 public:
  // Of a second at some ten thousand partitions, which is many.
  static constexpr std::size_t kEvents = 1 << 15;

  explicit TraceRing(TracedRounds rounds) : rounds_(rounds), events_(kEvents) {}

  void record(TraceStage stage, const TraceKey& key, std::uint32_t peer, std::uint64_t value) {
    if (key.round < rounds_.first || key.round > rounds_.last) return;
    TraceEvent event{.key = key, .stage = stage, .peer = peer, .time = now_ns(), .value = value};
    if (!events_.push(std::move(event))) dropped_.add();
  }
  bool pop(TraceEvent& event) { return events_.pop(event); }
  std::uint64_t dropped() const { return dropped_.get(); }

 private:
  const TracedRounds rounds_;
  MpscRing<TraceEvent> events_;
  Counter dropped_;
};

}  // namespace bps
