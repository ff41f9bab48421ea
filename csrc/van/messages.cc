// SPDX-License-Identifier: Apache-2.0
#include "van/messages.h"

#include "core/codec.h"

namespace bps::van {

Bytes encode(const Message& message) {
  return codec::encode(message);
}

std::optional<Message> decode(std::span<const std::byte> bytes) {
  return bytes.size() > kMostMessageBytes ? std::nullopt : codec::decode<Message>(bytes);
}

void check_spec(const TensorSpec& spec) {
  const std::string which = "tensor '" + spec.name.substr(0, 64) + "'";
  if (spec.name.empty() || spec.name.size() > kMostNameBytes) {
    throw Error(ErrorCode::kInvalidArgument, which + " has a name of " + std::to_string(spec.name.size()) + " bytes",
                "use a name of 1 to " + std::to_string(kMostNameBytes) + " bytes");
  }
  if (spec.shape.size() > kMostShapeBytes || spec.count > kMostElements) {
    throw Error(ErrorCode::kInvalidArgument, which + " has a shape beyond the limit",
                "declare at most 2^48 elements and a shape text of at most 1024 bytes");
  }
  if (size_of(Dtype{spec.dtype}) == 0) {
    throw Error(ErrorCode::kInvalidArgument, which + " has the unknown element type " + std::to_string(spec.dtype),
                "use an element type of dtype.h");
  }
}

}  // namespace bps::van
