// The 64 bytes in front of every push. They say everything the server needs, so it keeps no table per worker.
//
// A rank sends one of these for each (tensor, partition, round): with payload or without, wanting the result or only to
// be told that the round is over. The server takes nothing here on trust: see ServerLoop::check().
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "core/dtype.h"
#include "transport/handshake.h"

namespace bps::tensor {

// What the caller called. Ranks that mix kinds in one round are told so.
enum class OperationKind : std::uint8_t { kPushPull = 0, kReduceScatter, kAllGather, kBroadcast, kSplit };

enum PushFlags : std::uint8_t {
  kHasPayload = 1,  // the sender's bytes take part in the sum
  kIsPush = 2,      // counts as the sender's push of this round
  kIsPull = 4,      // the sender expects the result of this round (or, without kWantsData, word that it is done)
  kWantsData = 8,
};

struct PushHeader {
  std::uint16_t version;
  Dtype dtype;
  ReduceOp op;
  std::uint8_t flags;
  OperationKind kind;
  std::uint16_t member;  // the sender's place in the group
  std::uint32_t group;
  std::uint32_t tensor;
  std::uint32_t partition;
  std::uint32_t round;
  std::uint32_t immediate;  // of the answer
  std::uint32_t reserved;
  std::uint64_t length;      // bytes of the partition, with or without payload
  std::uint64_t answer_key;  // where the answer goes
  std::uint64_t answer_address;
  std::uint64_t padding;
};
static_assert(sizeof(PushHeader) == 64, "the header is one cache line and part of the protocol");

inline std::span<const std::byte> bytes_of(const PushHeader& header) {
  return std::as_bytes(std::span<const PushHeader, 1>(&header, 1));
}

}  // namespace bps::tensor
