// Control messages between a worker's loop and a server's loop, beside the payload on the data plane.
//
// Small, little-endian, bounds-checked: decode() answers nullopt for anything that is not exactly one valid message.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/bytes.h"

namespace bps::tensor {

// Worker to server, first on every link: how large its partitions get, whether it needs landing slots, and of how many
// data endpoints the link consists.
struct Attach {
  std::uint64_t largest_payload = 0;
  bool needs_slots = false;
  std::uint8_t data_endpoints = 1;
};

// Landing slots have two sizes. A push of at most so many bytes, header included, uses a small one, of which there are
// many: small tensors are limited by the number of messages in entry, large ones by their bytes.
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
};
struct Credits {
  std::vector<SlotCredit> slots;
};

// Server to worker: a push cannot be summed. `immediate` is the one the answer would have had; kWholeSession: the
// server cannot serve this worker at all.
inline constexpr std::uint32_t kWholeSession = 0xffffffff;
struct PushFailed {
  std::uint32_t immediate = 0;
  std::uint8_t code = 0;  // an ErrorCode
  std::string what;
  std::string hint;
};

// Worker to server, at an operation's deadline: who has not pushed this partition yet?
struct WhoIsMissing {
  std::uint32_t immediate = 0;
  std::uint32_t tensor = 0;
  std::uint32_t partition = 0;
  std::uint32_t round = 0;
};
struct Missing {
  std::uint32_t immediate = 0;
  std::vector<std::uint32_t> ranks;  // worker ranks
};

using ControlMessage = std::variant<Attach, Credits, PushFailed, WhoIsMissing, Missing>;

Bytes encode(const ControlMessage& message);
std::optional<ControlMessage> decode_control_message(std::span<const std::byte> bytes);

}  // namespace bps::tensor
