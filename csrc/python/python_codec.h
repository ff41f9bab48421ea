// SPDX-License-Identifier: Apache-2.0
// Makes a method of compression of Python functions that encode and decode. It is slow, and for trying an idea.
//
// Loops of worker processes call it, on threads of theirs, which take the GIL for that. So no thread may wait for a
// loop with the GIL: all calls of this module release it before they wait. The functions get copies, and what they
// return is copied, so that nothing of theirs can outlive the call.
//
// What a function raises is reported as Python reports what nobody can catch (sys.unraisablehook), with its traceback,
// and to the caller by CodecCall::fail().
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "compress/codec.h"

namespace bps::python {

class PythonCodec final : public compress::Codec {
 public:
  // The functions are encode(floats: bytes, seed: int) -> bytes, and decode(code: bytes, elements: int) -> bytes. A
  // code of n elements has ceil(n / block) * block_bytes bytes. They are never released, as loops may run to the end.
  PythonCodec(std::string name, pybind11::object encode, pybind11::object decode, std::size_t block,
              std::size_t block_bytes);

  std::size_t encoded_size(std::size_t elements) const override;
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] compress::Decoded decode(std::span<const std::byte> from, std::span<float> to,
                                         compress::Into into) const override;
  bool is_built_in() const override { return false; }

 private:
  struct Functions {
    pybind11::object encode;
    pybind11::object decode;
  };
  const std::string name_;
  Functions& functions_;
  std::size_t block_;
  std::size_t block_bytes_;
};

}  // namespace bps::python
