// SPDX-License-Identifier: Apache-2.0
// Describes one partition in one round: who has pushed, where the bytes lie, and who waits for the result. Belongs to
// the server loop's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "compress/compression.h"
#include "server/arrival.h"
#include "server/round_group.h"
#include "server/round_state.h"
#include "tensor/push_header.h"

namespace bps::server {

// Names a sequence of rounds. The group is a part of the key, so that a member can neither meet nor block rounds of a
// group that it is not in.
struct RoundKey {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t partition = 0;
  bool for_host = false;  // summed for the ranks of this host, as their relay
  bool operator==(const RoundKey&) const = default;
};

struct RoundKeyHash {
  std::size_t operator()(const RoundKey& key) const noexcept {
    return ((std::uint64_t{key.tensor} << 32) | key.partition) ^ (std::uint64_t{key.group} << 48) ^
           (std::uint64_t{key.for_host} << 63);
  }
};

// Counts what one worker session takes of the table. The table bounds it, so that a member that opens what it never
// ends costs a server a bounded amount of memory.
struct TableShare {
  std::uint64_t rounds = 0;  // those that it has opened and that are not over
  std::uint64_t words = 0;   // of 64 bits: the keys that it was the first to use, and their rounds out of order
};

struct KeyRounds;  // in the table

struct Round : RoundState {
  // Names the other loops that take part.
  struct Peers {
    std::uint16_t worker_loop = 0;    // all loops that talk to this one about a partition have one index
    std::uint32_t onward_server = 0;  // for_host: the server loop that the host's contribution goes on to
    std::int32_t priority = 0;        // for_host: the highest priority of the ranks
  };
  struct Counts {
    std::uint32_t pushed = 0;
    std::uint32_t done = 0;
    std::uint32_t landing = 0;           // members that are in AnswerStage::kLanding
    std::uint32_t writes_in_flight = 0;  // answers that still read the result slot
  };
  // Holds, for people, when the round was opened and summed, and whose push came last.
  struct History {
    std::uint64_t opened = 0;     // coarse_now_ns(), as summed_at
    std::uint64_t summed_at = 0;  // 0: the result is not known
    std::uint32_t last_rank = 0;  // its push came last
  };
  struct TableEntry {
    TableShare* opener = nullptr;
    KeyRounds* of_key = nullptr;
    Round* next_of_key = nullptr;
    std::uint32_t number = 0;    // never changes
    std::size_t open_index = 0;  // in the table's list of open rounds
  };

  RoundKey key;
  std::uint32_t number = 0;
  const RoundGroup* group = nullptr;
  const van::Contributors* contributors = nullptr;
  tensor::PushHeader first{};  // what all others must agree with
  Peers peers;
  Counts counts;
  bool is_queued = false;                              // the round waits in the RoundQueue, or for the redo log
  const compress::Compression* compression = nullptr;  // of the payloads that came compressed
  Slot* result = nullptr;                              // the slot that later and remote pulls are answered from
  std::vector<Arrival> arrivals;                       // by contributor; keeps its capacity between uses
  History history;
  TableEntry in_table;

  // Returns the number by which others name the round: tokens of writes, contributions of a host, rounds that are held.
  std::uint32_t token() const { return in_table.number; }
  // Returns true where a push may have this compression. All members that compress do so in one way; members on this
  // host need not compress.
  bool agrees(const compress::Compression* other) const {
    return compression == nullptr || other == nullptr || compression == other;
  }
  std::uint64_t elements() const { return first.length / size_of(first.dtype); }
  bool is_two_phase() const { return (first.flags & tensor::kTwoPhase) != 0; }
  // Returns true where the sum made here is a contribution, and not the result.
  bool is_contribution() const { return key.for_host && !group->ends_on_host; }
  // Returns true where all members get the bytes of one, and several have sent theirs.
  bool has_two_roots() const {
    const bool has_root = first.kind == tensor::OperationKind::kStore || tensor::copies(first.kind);
    return has_root && std::ranges::count_if(arrivals, &Arrival::has_payload) > 1;
  }

  void count_push() {
    if (++counts.pushed == contributors->size()) enter(RoundPhase::kGathered);
  }
  // Notes that a member that waits has its answer.
  void end_answered(Arrival& arrival) {
    arrival.answer.enter(AnswerStage::kAnswered);
    ++counts.done;
  }
  // Notes that a member waits for nothing more, which counts once.
  void end(Arrival& arrival) {
    if (arrival.is_done()) return;
    arrival.answer.enter(AnswerStage::kEnded);
    ++counts.done;
  }
};

inline Error different_roots() {
  return {ErrorCode::kMismatch, "ranks named different roots", "name one root on every rank"};
}

}  // namespace bps::server
