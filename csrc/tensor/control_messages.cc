// SPDX-License-Identifier: Apache-2.0
#include "tensor/control_messages.h"

#include "core/codec.h"

namespace bps::tensor {

Bytes encode(const ControlMessage& message) {
  return codec::encode(message);
}

std::optional<ControlMessage> decode(std::span<const std::byte> bytes) {
  return codec::decode<ControlMessage>(bytes);
}

}  // namespace bps::tensor
