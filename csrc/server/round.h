// SPDX-License-Identifier: Apache-2.0
// One partition in one round: who has pushed, where the bytes lie, and who waits for the result.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compress/compression.h"
#include "core/error.h"
#include "server/round_group.h"
#include "server/slot_pool.h"
#include "tensor/push_header.h"
#include "transport/transport.h"

namespace bps::server {

class WorkerSession;

// What one contributor has sent in this round: a member of the group, or a host by its relay.
struct Arrival {
  WorkerSession* session = nullptr;
  transport::DataEndpoint* data = nullptr;  // the push came here, and the answer goes back the same way
  Slot* slot = nullptr;                     // the payload lies in a slot
  transport::RemoteSpan span;               // or stays in the worker's memory (length > 0)
  std::uint64_t answer_key = 0;             // where the answer goes, and its immediate: as the pull says, if that has
  std::uint64_t answer_address = 0;         // come, else the push
  std::uint32_t immediate = 0;
  std::uint32_t push_immediate = 0;  // acknowledges a push without a pull
  bool wants_data = false;
  bool has_payload = false;
  bool is_compressed = false;  // its payload, and so what it is answered
  bool is_unrounded = false;   // its payload: see tensor::kUnrounded
  bool is_logged = false;      // in two phases: it reads the redo log, and an answer is the last word
  bool pushed = false;
  bool unacknowledged = false;  // a push without a pull whose payload still has to be copied, once there is a slot
  bool pull_waiting = false;
  bool landing = false;    // in two phases: has been answered, and the member has not said that the answer is there; it
                           // still waits, and so is not done
  bool in_place = false;   // the pass over the payloads writes the result straight into the worker's memory
  bool answered = false;   // with the result, or that the round is complete; never with a failure
  bool cancelled = false;  // the member waits for what becomes of its host's contribution, and not for the result
  bool done = false;       // the member has the result, or knows that the round failed
};

// Why a round has no result. Each member is told once.
struct RoundFailure {
  ErrorCode code;
  std::string what;
  std::string hint;
};

// What has rounds of its own. The group belongs to it, so that a member can neither meet nor block rounds of a group
// that it is not in.
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

// What one worker session makes the table keep. The table bounds it, so that a member that opens what it never ends
// costs a server a bounded amount of memory.
struct TableShare {
  std::uint64_t rounds = 0;  // that it has opened and that are not over
  std::uint64_t words = 0;   // of 64 bits: the keys that it was the first to use, and their rounds out of order
};

struct KeyRounds;  // in the table

struct Round {
  RoundKey key;
  std::uint32_t number = 0;
  const RoundGroup* group = nullptr;
  const van::Contributors* contributors = nullptr;
  TableShare* opener = nullptr;
  tensor::PushHeader first{};     // what all others must agree with
  std::uint16_t worker_loop = 0;  // of the workers: all loops that talk to this one about a partition have one index
  std::uint32_t place = 0;        // for_host: where the host's contribution goes on to
  std::int32_t priority = 0;      // for_host: the highest of the ranks
  std::uint64_t opened = 0;       // coarse_now_ns(), as summed_at
  std::uint64_t summed_at = 0;    // 0: the result is not known
  std::uint32_t last_rank = 0;    // whose push came last
  std::uint32_t pushed = 0;
  std::uint32_t done = 0;
  std::uint32_t landing = 0;           // members with Arrival::landing
  std::uint32_t writes_in_flight = 0;  // answers that still read the result slot
  bool awaits_network = false;         // for_host: the host has contributed, and the server has not answered
  bool summed = false;                 // the result is known
  std::uint64_t held_at = 0;           // kAccumulate: added as so many from this rank, and not answered; 0: not so
  bool waits = false;                  // for memory, or for workers that are out of slots: see RoundEngine::resume()
  const compress::Compression* compression = nullptr;  // of the payloads that came compressed
  std::optional<RoundFailure> failure;
  Slot* result = nullptr;         // where later and remote pulls are answered from
  std::vector<Arrival> arrivals;  // by contributor; keeps its capacity between uses
  KeyRounds* of_key = nullptr;
  Round* next_of_key = nullptr;
  std::size_t number_in_table = 0;  // never changes: names the round in tokens
  std::size_t open_index = 0;       // in the table's list of open rounds

  // Those that compress do so in one way; others may be of this host.
  bool agrees(const compress::Compression* other) const {
    return compression == nullptr || other == nullptr || compression == other;
  }
  bool is_two_phase() const { return (first.flags & tensor::kTwoPhase) != 0; }
  // A member is done, which counts once.
  void finish(Arrival& arrival) {
    done += arrival.done ? 0U : 1U;
    arrival.done = true;
  }
  bool has_all_pushes() const { return pushed == contributors->size(); }
  // Whether the sum made here is a contribution, and not the result.
  bool is_contribution() const { return key.for_host && !group->ends_on_host; }
};

}  // namespace bps::server
