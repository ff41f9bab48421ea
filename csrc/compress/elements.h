// SPDX-License-Identifier: Apache-2.0
// Elements as tensors have them, and as codecs see them: float32 as it is, and 16-bit floats, which are widened before
// they are encoded, so that all that is remembered and added is float32, and rounded once when a code has been decoded.
//
// A method that sends 16 bits of each element makes nothing shorter then, and such a tensor travels as it is. Nothing
// here allocates or throws. Addresses of elements need no alignment. Threading: pure functions.
#pragma once

#include <cstddef>
#include <span>

#include "compress/codec.h"
#include "core/dtype.h"

namespace bps::compress {

// to.size() elements of a compressible type, as float32; exact.
void widen(Dtype dtype, const std::byte* from, std::span<float> to, Into into = Into::kReplace);
// Rounds to nearest even, as the methods "bf16" and "fp16" do (half.h).
void narrow(Dtype dtype, std::span<const float> from, std::byte* to);

}  // namespace bps::compress
