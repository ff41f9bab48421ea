// SPDX-License-Identifier: Apache-2.0
// Says which bytes of a partition travel, and where they belong, by pure functions that the ways out and back share.
//
// Most kinds of operation differ for the worker only in this. For each partition of the cut, a member of the group may
// contribute bytes from its input, may want bytes in its output, or both. Offsets count from the start of the memory
// that the caller passed, which is the whole tensor or the member's own shard.
#pragma once

#include <cstdint>

#include "compress/label.h"
#include "tensor/partition.h"
#include "tensor/push_header.h"

namespace bps::tensor {

struct MemberCall {
  OperationKind kind = OperationKind::kPushPull;
  bool pushes = true;          // kSplit: push() and pull() are two requests of one round
  std::uint32_t position = 0;  // the position of the caller in the group
  std::uint32_t root = 0;      // kBroadcast: the position of the rank whose bytes everybody gets
};

struct Extent {
  std::uint64_t input_offset = 0;   // where the contribution lies, if has_payload()
  std::uint64_t output_offset = 0;  // where the result belongs, if wants_data()
  std::uint64_t length = 0;         // that of the partition, in bytes
  std::uint8_t flags = 0;           // PushFlags
  std::uint64_t encoded = 0;        // kCompressed, kUnrounded: how many bytes travel in its place

  bool has_payload() const { return (flags & kHasPayload) != 0; }
  bool wants_data() const { return (flags & kWantsData) != 0; }
  bool is_compressed() const { return (flags & kCompressed) != 0; }
  // These return the bytes that travel out, and back; 0: none.
  std::uint64_t payload_bytes() const {
    if ((flags & (kCompressed | kUnrounded)) == 0) return length;
    return is_compressed() ? compress::kLabelBytes + encoded : encoded;
  }
  std::uint64_t answer_bytes() const { return is_compressed() ? encoded : length; }
};

// Returns true when an operation of this kind is cut into one shard per member.
constexpr bool is_sharded(OperationKind kind) {
  return kind == OperationKind::kReduceScatter || kind == OperationKind::kAllGather;
}

// Returns the flags of one partition that lies in `shard`.
constexpr std::uint8_t flags_of(const MemberCall& request, std::uint32_t shard) {
  constexpr std::uint8_t kBoth = kIsPush | kIsPull;
  const bool own = shard == request.position;
  switch (request.kind) {
    case OperationKind::kPushPull: return kBoth | kHasPayload | kWantsData;
    case OperationKind::kReduceScatter: return kBoth | kHasPayload | (own ? kWantsData : 0);
    case OperationKind::kAllGather: return kBoth | (own ? kHasPayload : kWantsData);
    case OperationKind::kReadFeedback:
    case OperationKind::kWriteFeedback:
    case OperationKind::kAccumulate: return kBoth | kHasPayload | kWantsData;
    case OperationKind::kStore:
    case OperationKind::kBroadcast: return kBoth | (request.root == request.position ? kHasPayload : kWantsData);
    case OperationKind::kSplit: return request.pushes ? kIsPush | kHasPayload : kIsPull | kWantsData;
  }
  return 0;
}

// `cut` has one shard per member where is_sharded(), and one shard otherwise; `partition` < cut.count().
inline Extent extent_of(const MemberCall& request, const Partitioning& cut, std::uint64_t partition) {
  const Partitioning::Piece piece = cut.piece(partition);
  Extent extent{piece.offset, piece.offset, piece.length, flags_of(request, piece.shard), 0};
  // The caller's memory on one side is its own shard alone, whose bytes count from zero.
  if (request.kind == OperationKind::kAllGather) extent.input_offset -= cut.shard_offset(request.position);
  if (request.kind == OperationKind::kReduceScatter) extent.output_offset -= cut.shard_offset(request.position);
  return extent;
}

}  // namespace bps::tensor
