// SPDX-License-Identifier: Apache-2.0
// Defines the control messages between a worker's loop and a server's loop. Tensors travel behind push_header.h. Fields
// and bounds are lists for core/codec.h; the receiver compares with its grants.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/below.h"
#include "core/bytes.h"
#include "core/error.h"
#include "transport/rails.h"

namespace bps::tensor {

// A worker sends this first on every connection. It tells the size of its largest partition, whether it needs landing
// slots, and how many data endpoints belong to the connection.
struct Attach {
  std::uint64_t largest_payload = 0;
  bool needs_slots = false;
  std::uint8_t data_endpoints = 1;
  bool wants_log = false;  // wants the server's redo log, see RedoLogAt; for memory that both share
  static constexpr void fields(auto& io, auto& m) {
    io(m.largest_payload, m.needs_slots, m.data_endpoints, m.wants_log);
    io.require([&] { return m.data_endpoints > 0; });
  }
  bool operator==(const Attach&) const = default;
};

// Landing slots have two sizes. A push of at most kSmallSlot bytes, header included, uses a small slot, of which there
// are many. So the number of pushes in flight limits small tensors, and their bytes limit large ones.
inline constexpr std::uint64_t kSmallSlot = 8 * 1024;
constexpr bool is_small_slot(std::uint64_t capacity) {
  return capacity <= kSmallSlot;
}

// Numbers a landing slot of a server, which has no more than that: workers keep tables by it.
using SlotNumber = Below<std::uint32_t, 1 << 20>;

// Grants a landing slot, which the worker may fill once. The slot's number is the write's immediate.
struct SlotCredit {
  SlotNumber slot{};
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t capacity = 0;  // header included
  static constexpr void fields(auto& io, auto& m) { io(m.slot, m.key, m.address, m.capacity); }
  bool operator==(const SlotCredit&) const = default;
};
struct Credits {
  std::vector<SlotCredit> slots;
  // These are the keys on the rails after the first, for each slot, where each rail of the server has keys of its own.
  // They are the same each time that a slot is granted.
  std::vector<std::uint64_t> other_keys;
  static constexpr void fields(auto& io, auto& m) {
    io(m.slots, m.other_keys);
    io.require([&] { return m.has_keys_for_each_slot(); });
  }
  constexpr bool has_keys_for_each_slot() const {
    if (other_keys.empty()) return true;
    if (slots.empty() || other_keys.size() % slots.size() != 0) return false;
    return other_keys.size() / slots.size() < transport::kMostRails;
  }
  bool operator==(const Credits&) const = default;
};

// A server sends this when a push cannot be summed. `immediate` is the one that the answer would have had.
// kWholeSession means that the server cannot serve this worker at all.
inline constexpr std::uint32_t kWholeSession = 0xffffffff;
inline constexpr std::size_t kMostTextBytes = 16384;  // both texts fit into one control message
struct PushFailed {
  std::uint32_t immediate = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string what;
  std::string hint;
  static constexpr void fields(auto& io, auto& m) {
    io(m.immediate, m.code);
    io.bounded(m.what, kMostTextBytes);
    io.bounded(m.hint, kMostTextBytes);
  }
  bool operator==(const PushFailed&) const = default;
};

// A worker sends this when its rank gives an operation up, after its deadline or another failure. The server fails the
// rounds of these partitions for all ranks of the group, unless they have been summed. It tells the other ranks `code`,
// `what` and `hint`. It replies with one Cancelled, after which it neither reads nor writes the operation's memory,
// except for the answers that the reply names.
struct CancelledPartition {
  std::uint32_t immediate = 0;  // the one that its answer has, or would have had
  std::uint32_t partition = 0;
  std::uint32_t place = 0;  // as in its push header
  static constexpr void fields(auto& io, auto& m) { io(m.immediate, m.partition, m.place); }
  bool operator==(const CancelledPartition&) const = default;
};
inline constexpr std::size_t kMostCancelled = 2048;  // those in one message, beside the texts
struct Cancel {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string what;
  std::string hint;
  std::vector<CancelledPartition> partitions;
  bool for_host = false;  // is for the relay of the host, about the rounds of pushes with kForHost
  static constexpr void fields(auto& io, auto& m) {
    io(m.group, m.tensor, m.round, m.for_host, m.code);
    io.bounded(m.what, kMostTextBytes);
    io.bounded(m.hint, kMostTextBytes);
    io(m.partitions);
    io.require([&] { return m.partitions.size() <= kMostCancelled; });
  }
  bool operator==(const Cancel&) const = default;
};

// A server replies to a Cancel with this, by the immediates of its partitions.
struct Cancelled {
  std::vector<std::uint32_t> aborted;    // no answer was sent, and none will be
  std::vector<std::uint32_t> answered;   // the answer has been sent, or an error that was sent before
  std::vector<std::uint32_t> missing;    // worker ranks that had not pushed one of the aborted partitions
  std::vector<std::uint32_t> pending{};  // an answer or a failure will follow: its host has contributed, or in
                                         // two phases the members have been sent answers
  static constexpr void fields(auto& io, auto& m) { io(m.aborted, m.answered, m.pending, m.missing); }
  bool operator==(const Cancelled&) const = default;
};

// A worker sends this while it waits for answers and hears nothing. The server replies with an Echo of the same number,
// which proves that its loop makes progress and that the network carries messages both ways.
struct Ping {
  std::uint32_t number = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.number); }
  bool operator==(const Ping&) const = default;
};
struct Echo {
  std::uint32_t number = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.number); }
  bool operator==(const Echo&) const = default;
};

// A server sends this to a relay when a round fails to which the host has not contributed yet, so that ranks which wait
// there for others of their host need not wait on.
struct RoundFailed {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t partition = 0;
  std::uint32_t round = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string what;
  std::string hint;
  static constexpr void fields(auto& io, auto& m) {
    io(m.group, m.tensor, m.partition, m.round, m.code);
    io.bounded(m.what, kMostTextBytes);
    io.bounded(m.hint, kMostTextBytes);
  }
  bool operator==(const RoundFailed&) const = default;
};

// A server sends this to a relay when all ranks of its host that are in the group have left, and the host's
// contribution to a round is not here. It may be on its way, as a push on its own has ended when the relay holds it.
// Where nothing is, the relay gives the round up with a Cancel that says the same.
struct HostHasLeft {
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t partition = 0;
  std::uint32_t round = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string what;
  std::string hint;
  static constexpr void fields(auto& io, auto& m) {
    io(m.group, m.tensor, m.partition, m.round, m.code);
    io.bounded(m.what, kMostTextBytes);
    io.bounded(m.hint, kMostTextBytes);
  }
  bool operator==(const HostHasLeft&) const = default;
};

// A worker sends this where several paths join the two (transport/control_paths.h). It tells how many answers have come
// in by each data connection of a path. The server keeps results until then, because what it sent may be lost on the
// way.
inline constexpr std::size_t kMostStreams = 64;  // those of a path: BPS_TCP_STREAMS
struct Received {
  std::uint16_t path = 0;
  std::vector<std::uint32_t> answers;
  static constexpr void fields(auto& io, auto& m) {
    io(m.path, m.answers);
    io.require([&] { return m.answers.size() <= kMostStreams; });
  }
  bool operator==(const Received&) const = default;
};

// The sender has lost a path, and has closed its connections, so that nothing more comes in by them. It tells how many
// writes have come in by each data connection before. A worker sends this first. The server replies with the same, and
// answers again what has not arrived. The worker then repeats the pushes that have not.
struct PathLost {
  std::uint16_t path = 0;
  std::vector<std::uint32_t> received;
  static constexpr void fields(auto& io, auto& m) {
    io(m.path, m.received);
    io.require([&] { return m.received.size() <= kMostStreams; });
  }
  bool operator==(const PathLost&) const = default;
};

// A worker sends this before its PathLost. It tells the keys of the memory to which answers go, on another of its paths
// (`by`), whose rail may have other keys. It sends one at least for each path that the server may take.
inline constexpr std::size_t kMostKeys = 2048;  // those in one message
struct AnswerKeys {
  struct Key {
    std::uint64_t lost = 0;  // the key in the pushes that went out by the lost path
    std::uint64_t other = 0;
    static constexpr void fields(auto& io, auto& m) { io(m.lost, m.other); }
    bool operator==(const Key&) const = default;
    auto operator<=>(const Key&) const = default;
  };
  std::uint16_t path = 0;  // the lost path
  std::uint16_t by = 0;
  std::vector<Key> keys;
  static constexpr void fields(auto& io, auto& m) {
    io(m.path, m.by, m.keys);
    io.require([&] { return m.keys.size() <= kMostKeys; });
  }
  bool operator==(const AnswerKeys&) const = default;
};

// A server sends this when it has lost a path and closed its connections, and asks for a PathLost.
struct PathBroken {
  std::uint16_t path = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.path); }
  bool operator==(const PathBroken&) const = default;
};

// Both are about rounds in two phases (kTwoPhase). Landed goes to the server: the answers with these immediates have
// come in. Committed goes to the worker: every member of these rounds has its answer, so that each may put it over its
// input. A member that wanted no data learns by it that the round is complete.
inline constexpr std::size_t kMostLanded = 4096;  // those in one message
struct Landed {
  std::vector<std::uint32_t> immediates;
  static constexpr void fields(auto& io, auto& m) {
    io(m.immediates);
    io.require([&] { return m.immediates.size() <= kMostLanded; });
  }
  bool operator==(const Landed&) const = default;
};
struct Committed {
  std::vector<std::uint32_t> immediates;
  static constexpr void fields(auto& io, auto& m) {
    io(m.immediates);
    io.require([&] { return m.immediates.size() <= kMostLanded; });
  }
  bool operator==(const Committed&) const = default;
};

// A server sends this: where its redo log (redo_log.h) is, in memory that it shares.
struct RedoLogAt {
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.key, m.address, m.length); }
  bool operator==(const RedoLogAt&) const = default;
};

// The position in this list is the type on the wire, so add new messages at the end.
using ControlMessage = std::variant<Attach, Credits, PushFailed, Cancel, Cancelled, Ping, Echo, RoundFailed, Received,
                                    PathLost, PathBroken, AnswerKeys, Landed, Committed, RedoLogAt, HostHasLeft>;

// Cuts texts that are beyond their limit.
Bytes encode(const ControlMessage& message, std::uint32_t epoch);
// Returns nothing for malformed bytes, and for those of another epoch.
std::optional<ControlMessage> decode(std::span<const std::byte> bytes, std::uint32_t epoch);

}  // namespace bps::tensor
