// SPDX-License-Identifier: Apache-2.0
// The control messages between a worker's loop and a server's loop: everything but tensors, see push_header.h for
// those. Fields and bounds are lists for core/codec.h; the receiver compares with what it granted.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"

namespace bps::tensor {

// Worker to server, first on every connection: the size of its largest partition, whether it needs landing slots, and
// how many data endpoints belong to the connection.
struct Attach {
  std::uint64_t largest_payload = 0;
  bool needs_slots = false;
  std::uint8_t data_endpoints = 1;
  static constexpr void fields(auto& io, auto& m) {
    io(m.largest_payload, m.needs_slots, m.data_endpoints);
    io.require([&] { return m.data_endpoints > 0; });
  }
  bool operator==(const Attach&) const = default;
};

// Landing slots have two sizes. A push of at most kSmallSlot bytes, header included, uses a small slot, of which there
// are many: small tensors are limited by the number of pushes in flight, large ones by their bytes.
inline constexpr std::uint64_t kSmallSlot = 8 * 1024;
constexpr bool is_small_slot(std::uint64_t capacity) {
  return capacity <= kSmallSlot;
}

// A landing slot that the worker may fill once; its number is the write's immediate.
struct SlotCredit {
  std::uint32_t slot = 0;
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t capacity = 0;  // header included
  static constexpr void fields(auto& io, auto& m) { io(m.slot, m.key, m.address, m.capacity); }
  bool operator==(const SlotCredit&) const = default;
};
struct Credits {
  std::vector<SlotCredit> slots;
  static constexpr void fields(auto& io, auto& m) { io(m.slots); }
  bool operator==(const Credits&) const = default;
};

// Server to worker: a push cannot be summed. `immediate` is the one that the answer would have had. kWholeSession means
// that the server cannot serve this worker at all.
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

// Worker to server, at an operation's deadline: which ranks have not pushed this partition yet? The reply is Missing.
struct WhoIsMissing {
  std::uint32_t immediate = 0;
  std::uint32_t tensor = 0;
  std::uint32_t partition = 0;
  std::uint32_t round = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.immediate, m.tensor, m.partition, m.round); }
  bool operator==(const WhoIsMissing&) const = default;
};
struct Missing {
  std::uint32_t immediate = 0;
  std::vector<std::uint32_t> ranks;  // worker ranks
  static constexpr void fields(auto& io, auto& m) { io(m.immediate, m.ranks); }
  bool operator==(const Missing&) const = default;
};

// The position in this list is the type on the wire: append only.
using ControlMessage = std::variant<Attach, Credits, PushFailed, WhoIsMissing, Missing>;

// Texts beyond their limit are cut.
Bytes encode(const ControlMessage& message);
// Nothing for malformed bytes.
std::optional<ControlMessage> decode(std::span<const std::byte> bytes);

}  // namespace bps::tensor
