// SPDX-License-Identifier: Apache-2.0
// Keeps the partitions of a worker loop that are on their way, from the push until the answer.
//
// A partition's index in the table, with a generation that changes each time the entry is used again, is the immediate
// of the answer. So a late or repeated answer finds nothing. Belongs to one thread. Memory grows to the largest number
// in flight at one time and stays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "worker/transfer.h"
#include "worker/transport_memory.h"

namespace bps::worker {

class ServerConnection;

// The diagram in docs/notes/operations.md has states beside these: a partition that is queued has no entry yet, and one
// that is complete or ended has none any more.
struct InFlight {
  // A stage says how far the partition has come.
  enum class Stage : std::uint8_t {
    kSent,
    kLanded,  // in two phases: the answer is here, and counts once the server commits it; or a device's copy has failed
    kNeverSent,  // it was cancelled before: no answer belongs to it
    kCopying,    // a device copies the result to where it belongs, and only that ends the partition
  };
  // An end other than kOpen says how the partition ends, because it cannot complete. It is over as soon as the
  // transport has read what it reads.
  enum class End : std::uint8_t {
    kOpen,
    kAborted,
    kUndecided,  // as kAborted, but it is not known what becomes of its round
  };

  Transfer* transfer = nullptr;  // null: the entry is free
  ServerConnection* server = nullptr;
  Part part{};
  std::uint8_t generation = 0;
  Stage stage = Stage::kSent;
  End end = End::kOpen;
  bool unsent_bytes = false;        // the transport still reads the payload, in the caller's memory or in `staged`
  tensor::SlotNumber slot{};        // the landing slot that it is sent to, where the server grants slots
  std::uint64_t length = 0;         // bytes that travel to the server
  std::uint64_t answer_length = 0;  // bytes that travel back
  std::uint64_t cut_off = 0;        // bytes of the answer that had come over the input when a connection ended
  StagingBuffer* staged = nullptr;  // where the payload is read, the answer lands, or both: see Route
  // This is what the server owes since the partition was cancelled. If it might owe that for ever, a server that
  // replies to everything else would keep the caller's memory for ever.
  enum class Owed : std::uint8_t { kNothing, kReply, kAnswer, kOutcome };
  Owed owed = Owed::kNothing;
  Clock::time_point due{};

  bool has_landed() const { return stage == Stage::kLanded; }
  bool is_copying() const { return stage == Stage::kCopying; }
  bool was_sent() const { return stage != Stage::kNeverSent; }
};

// Tells how long a server may owe that, in times for silence. The outcome of a pending round is known when the members
// for which the server waits itself have been judged, and there may be two of these in a row. A relay that waits for
// its server judges it before the ranks of its host judge the relay, because it begins to wait no later than they do.
constexpr double silences_until(InFlight::Owed what, bool by_relay) {
  if (what != InFlight::Owed::kOutcome) return 1;
  return by_relay ? 5 : 3;
}

// Tells where the answer of a partition that wants data is written, as a server that answers by this rail has to name
// it.
inline transport::RemoteSpan answer_span(const InFlight& entry, const tensor::Extent& extent, std::size_t rail) {
  const Transfer& transfer = *entry.transfer;
  const bool staged = entry.staged != nullptr;
  const transport::Region& region = staged ? *entry.staged->region : *transfer.output;
  const std::byte* at = staged ? entry.staged->bytes() : transfer.output_bytes + extent.output_offset;
  return region.remote(static_cast<std::uint64_t>(at - region.bytes().data()), extent.answer_bytes(), rail);
}

class InFlightTable {
 public:
  std::uint32_t allocate() {
    if (free_.empty()) {
      entries_.emplace_back();
      return static_cast<std::uint32_t>(entries_.size() - 1);
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  // An entry whose partition was never sent keeps its generation.
  void free_unsent(std::uint32_t index) {
    entries_[index] = InFlight{.generation = entries_[index].generation};
    free_.push_back(index);
  }
  void free(std::uint32_t index) {
    entries_[index] = InFlight{.generation = static_cast<std::uint8_t>(entries_[index].generation + 1)};
    free_.push_back(index);
  }

  std::uint32_t size() const { return static_cast<std::uint32_t>(entries_.size()); }
  InFlight& operator[](std::uint32_t index) { return entries_[index]; }
  const InFlight& operator[](std::uint32_t index) const { return entries_[index]; }

  std::uint32_t immediate_of(std::uint32_t index) const {
    return index | std::uint32_t{entries_[index].generation} << kIndexBits;
  }
  static std::uint32_t index_of(std::uint32_t immediate) { return immediate & kIndexMask; }
  // Returns the partition that an immediate from `server` names, or nullptr.
  InFlight* find(std::uint32_t immediate, const ServerConnection& server) {
    return const_cast<InFlight*>(std::as_const(*this).find(immediate, server));
  }
  const InFlight* find(std::uint32_t immediate, const ServerConnection& server) const {
    const std::uint32_t index = index_of(immediate);
    if (index >= entries_.size()) return nullptr;
    const InFlight& entry = entries_[index];
    const bool same =
        entry.transfer != nullptr && entry.server == &server && entry.generation == immediate >> kIndexBits;
    return same ? &entry : nullptr;
  }

 private:
  static constexpr int kIndexBits = 24;
  static constexpr std::uint32_t kIndexMask = (1U << kIndexBits) - 1;
  std::vector<InFlight> entries_;
  std::vector<std::uint32_t> free_;
};

}  // namespace bps::worker
