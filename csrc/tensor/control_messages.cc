// SPDX-License-Identifier: Apache-2.0
#include "tensor/control_messages.h"

#include "core/codec.h"

namespace bps::tensor {
namespace {

// Holds a message as it travels.
struct Envelope {
  std::uint32_t epoch = 0;
  ControlMessage message;
  static constexpr void fields(auto& io, auto& m) { io(m.epoch, m.message); }
};

}  // namespace

Bytes encode(const ControlMessage& message, std::uint32_t epoch) {
  Bytes bytes(sizeof epoch + codec::size_of_message(message));  // for an Envelope, without a copy of the message
  codec::Put(bytes.data())(epoch, message);
  return bytes;
}

std::optional<ControlMessage> decode(std::span<const std::byte> bytes, std::uint32_t epoch) {
  auto envelope = codec::decode<Envelope>(bytes);
  if (!envelope || envelope->epoch != epoch) return std::nullopt;
  return std::move(envelope->message);
}

}  // namespace bps::tensor
