// SPDX-License-Identifier: Apache-2.0
// A codec turns float32 elements into fewer bytes for the wire, and back. To add a method, derive from Codec and name
// an instance in codec.cc.
//
// Codecs hold no state and are thread-safe; what a method remembers between rounds (error_feedback.h) lies with the
// caller. The encoded size follows from the element count alone, so that buffers exist before the first round. Nothing
// here allocates or throws. The bytes are little-endian and the same on every machine: no result depends on the
// instruction set. Buffers need no alignment on the encoded side, and must not overlap.
//
// A decoder never reads or writes out of bounds, whatever bytes it is given; it writes nothing unless it returns kOk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace bps::compress {

enum class Decoded : std::uint8_t {
  kOk,
  kWrongSize,  // there are not encoded_size(elements) bytes
  kMalformed,  // no encoder writes these bytes
};

// What becomes of an element of the destination.
enum class Into : std::uint8_t { kReplace, kAdd, kSubtract };

class Codec {
 public:
  virtual ~Codec() = default;

  // What users write, such as "int8".
  virtual std::string_view name() const = 0;
  virtual std::size_t encoded_size(std::size_t elements) const = 0;
  // `to` has encoded_size(from.size()) bytes: all of them are written.
  virtual void encode(std::span<const float> from, std::span<std::byte> to) const = 0;
  [[nodiscard]] virtual Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const = 0;
};

std::span<const Codec* const> codecs();
// Null when there is none of that name.
const Codec* find_codec(std::string_view name);

}  // namespace bps::compress
