// SPDX-License-Identifier: Apache-2.0
// Defines the 64 bytes in front of every push. They say all that the server needs to know about it.
//
// A rank sends one for each (tensor, partition, round), with or without payload. It asks either for the result or only
// for word that the round is complete. The list of fields checks what holds for every header. The server checks the
// rest against what it granted to the sender (server/push_check.h).
#pragma once

#include <cstdint>
#include <span>

#include "core/codec.h"
#include "core/dtype.h"
#include "transport/handshake.h"

namespace bps::tensor {

// Names the call that was made. Ranks that mix kinds in one round are told so.
enum class OperationKind : std::uint8_t {
  kPushPull = 0,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kSplit,
  kStore,       // a broadcast, whose result the servers keep
  kAccumulate,  // adds to what they keep, and gets the result, without the other ranks: server/stored_partition.h
  // These are about what servers feed back of a tensor whose sums are compressed (server/compressed_sum.h): everybody
  // reads it, or the sum of what is pushed replaces it.
  kReadFeedback,
  kWriteFeedback,
};
constexpr bool is_valid(OperationKind kind) {
  return kind <= OperationKind::kWriteFeedback;
}
// Returns true where the bytes of one member are the result.
constexpr bool copies(OperationKind kind) {
  return kind == OperationKind::kAllGather || kind == OperationKind::kBroadcast;
}
// Returns true where that member is named by its callers.
constexpr bool has_root(OperationKind kind) {
  return kind == OperationKind::kBroadcast || kind == OperationKind::kStore;
}
constexpr bool is_feedback(OperationKind kind) {
  return kind >= OperationKind::kReadFeedback;
}

// This is the group of a rank alone. Its rounds wait for nobody, and nobody needs to make it.
inline constexpr std::uint32_t kAlone = std::uint32_t{1} << 31;

enum PushFlags : std::uint8_t {
  kHasPayload = 1,  // the sender's bytes take part in the sum
  kIsPush = 2,      // counts as the sender's push of this round
  kIsPull = 4,      // the sender expects an answer: the result of this round with kWantsData, else that it is complete
  kWantsData = 8,
  kForHost = 16,  // goes from a rank to the relay of its host, which sums for all its ranks before it pushes: see place
  // The loss of the server must cost nothing. Of each byte of the partition, at any time until the round is over, some
  // member has the result in its hands, or every member has its input. So an answer counts once all members have theirs
  // (see Landed), or it is the last word of a server that keeps a redo log (see PushHeader::place).
  kTwoPhase = 32,
  // The payload is a label and a code (compress/), and so the answer is a code. Elements are float32, or 16-bit floats
  // whose code is that of the same values in float32. They are added, in one operation that pushes and pulls.
  kCompressed = 64,
  // The payload is the exact sum of a host's ranks (unrounded.h). The answer is like that of the other pushes.
  kUnrounded = 128,
};

// Describes an addition, as PushHeader::place encodes it.
struct Addition {
  std::uint16_t most_ahead;  // how many additions it may be ahead of the slowest rank, plus one; 0: any number
  std::uint16_t tries;       // how many rounds ago it was first sent, and perhaps added; 0: it is new

  static constexpr Addition of(std::uint32_t place) {
    return {static_cast<std::uint16_t>(place), static_cast<std::uint16_t>(place >> 16)};
  }
  constexpr std::uint32_t place() const { return std::uint32_t{tries} << 16 | most_ahead; }
};

struct PushHeader {
  std::uint16_t version;
  Dtype dtype;
  ReduceOp op;
  std::uint8_t flags;
  OperationKind kind;
  std::uint16_t position;  // the sender's position in the group; of a host's contribution, that of its lowest rank
  std::uint32_t group;
  std::uint32_t tensor;
  std::uint32_t partition;
  std::uint32_t round;
  std::uint32_t immediate;   // that of the answer
  std::uint32_t epoch;       // that of the sender's view: a push of another epoch is dropped and counted
  std::uint32_t length;      // that of the partition in bytes, with or without payload
  std::uint32_t root;        // kBroadcast, kStore: the position whose bytes everybody gets, or kNobody; zero in others
  std::uint64_t answer_key;  // where the answer goes
  std::uint64_t answer_address;
  // The kind of push gives the next two their meaning; both are zero in all other kinds:
  // - kForHost: the priority of the operation, for the queue of the relay; the server loop that the host's contribution
  //   goes on to, among all.
  // - kAccumulate: the group that has stored the weights, see stored_by(); an Addition.
  // - kTwoPhase: zero; kLogged, if the sender shares memory with the server and reads its redo log when it is lost.
  std::int32_t priority;
  std::uint32_t place;

  static constexpr std::uint32_t kNobody = ~std::uint32_t{0};  // a kStore that gives back what the servers keep
  static constexpr std::uint32_t kLogged = 1;

  // kAccumulate: returns the group that has stored what is added to.
  constexpr std::uint32_t stored_by() const { return static_cast<std::uint32_t>(priority); }
  constexpr void add_to(std::uint32_t stored_group) { priority = static_cast<std::int32_t>(stored_group); }

  static constexpr void fields(auto& io, auto& m) {
    io(m.version, m.dtype, m.op, m.flags, m.kind, m.position, m.group, m.tensor, m.partition, m.round, m.immediate);
    io(m.epoch, m.length, m.root, m.answer_key, m.answer_address, m.priority, m.place);
    io.require([&] { return m.version == transport::kProtocolVersion && m.length > 0; });
    io.require([&] { return m.length % size_of(m.dtype) == 0; });
    io.require([&] { return (m.flags & (kIsPush | kIsPull)) != 0; });
    io.require([&] { return (m.flags & kHasPayload) == 0 || (m.flags & kIsPush) != 0; });
    io.require([&] { return m.root == 0 || has_root(m.kind); });
    // One look tells that a push has none of these, as most do not.
    io.require([&] {
      const bool is_special = m.flags >= kForHost || is_exact(m.op) || m.kind >= OperationKind::kStore;
      return is_special ? is_allowed(m) : m.priority == 0 && m.place == 0;
    });
  }

 private:
  static constexpr bool is_allowed(const PushHeader& m) {
    constexpr std::uint8_t kBoth = kIsPush | kIsPull;
    const auto has = [&](std::uint8_t all) { return (m.flags & all) == all; };
    const auto has_any = [&](std::uint8_t some) { return (m.flags & some) != 0; };
    const bool accumulates = m.kind == OperationKind::kAccumulate;
    const std::uint32_t most = has(kTwoPhase) ? kLogged : 0;
    if (!has(kForHost) && !accumulates && (m.priority != 0 || m.place > most)) return false;
    if (has(kTwoPhase) && !has(kBoth)) return false;
    if (has(kCompressed)) {
      const bool adds = m.op == ReduceOp::kSum || m.op == ReduceOp::kAverage;
      const bool fits = adds && is_compressible(m.dtype);
      if (!has(kHasPayload | kBoth) || has_any(kForHost | kTwoPhase) || !fits) return false;
    }
    if (is_exact(m.op) && !is_floating(m.dtype)) return false;
    if (m.op == ReduceOp::kExactSumToOdd && m.dtype != Dtype::kFloat64) return false;
    if (has(kUnrounded) && (!is_exact(m.op) || !has(kHasPayload) || has_any(kForHost | kCompressed))) {
      return false;
    }
    if (is_feedback(m.kind)) {
      return has(kHasPayload | kBoth | kWantsData) && !has_any(kTwoPhase | kCompressed | kUnrounded) &&
             m.op == ReduceOp::kSum && m.dtype == Dtype::kFloat32;
    }
    if (m.kind >= OperationKind::kStore && has_any(kForHost | kTwoPhase | kCompressed | kUnrounded)) return false;
    // One rank must not replace what everybody of a group adds to.
    if (m.kind == OperationKind::kStore && (m.group & kAlone) != 0) return false;
    if (m.kind == OperationKind::kStore && m.root == kNobody && has(kHasPayload)) return false;
    return !accumulates || (has(kHasPayload | kBoth | kWantsData) && m.op == ReduceOp::kSum && (m.group & kAlone) != 0);
  }
};
static_assert(codec::Plain<PushHeader> && sizeof(PushHeader) == 64, "the data path sends the struct: one cache line");

inline std::span<const std::byte> bytes_of(const PushHeader& header) {
  return codec::bytes_of(header);
}

}  // namespace bps::tensor
