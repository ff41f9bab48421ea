// SPDX-License-Identifier: Apache-2.0
// A codec turns float32 elements into fewer bytes for the wire, and back. To add a method, derive from Codec and add a
// line to the table in codec.cc.
//
// Codecs are immutable and thread-safe. What is remembered between rounds (error_feedback.h) lies with the caller. The
// encoded size follows from the element count alone, so that buffers exist before the first round. Codecs neither
// allocate nor throw. The bytes are little-endian and the same on every machine: no result depends on the instruction
// set. Buffers need no alignment on the encoded side, and must not overlap.
//
// A decoder never reads or writes out of bounds, whatever bytes it is given, even if they change while it reads them.
// It writes nothing unless it returns kOk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "compress/parameters.h"

namespace bps::compress {

enum class Decoded : std::uint8_t {
  kOk,
  kWrongSize,  // there are not encoded_size(elements) bytes
  kMalformed,  // no encoder writes these bytes
  kFailed,     // the codec is the program's own, and could not tell: see CodecCall::take_failure()
};

// Says whether a decoded value replaces an element of the destination, is added to it, or is taken from it.
enum class Into : std::uint8_t { kReplace, kAdd, kSubtract };

class Codec {
 public:
  virtual ~Codec() = default;

  virtual std::size_t encoded_size(std::size_t elements) const = 0;
  // Writes all encoded_size(from.size()) bytes of `to`. Methods that need random numbers draw them from `seed`: equal
  // seeds give equal bytes.
  virtual void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const = 0;
  [[nodiscard]] virtual Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const = 0;
  // Returns false for a codec of add_codec(). Processes that have not added it cannot read its bytes, and each call may
  // fail, as CodecCall::take_failure() tells (codec_call.h).
  virtual bool is_built_in() const { return true; }
};

// Returns the names that make_codec() knows, such as "int8".
std::vector<std::string_view> codec_names();
// Takes the method's own parameters from `parameters`, and leaves the others there. Throws Error (kInvalidArgument)
// when there is no such method, or a parameter's value makes no sense.
std::shared_ptr<const Codec> make_codec(std::string_view name, Parameters& parameters);
// Lets make_codec() know one more method, without parameters of its own, in this process and until its end. Any thread
// may call it. Throws Error (kInvalidArgument) when the name is taken, or is not of the form "a_1".
void add_codec(std::string_view name, std::shared_ptr<const Codec> codec);

}  // namespace bps::compress
