// SPDX-License-Identifier: Apache-2.0
// Turns elements as tensors have them into elements as codecs see them, and back. float32 stays as it is. 16-bit floats
// are widened before encoding: what is remembered and added is float32, and rounded once after decoding.
//
// A method that sends 16 bits of each element then makes nothing shorter, and such a tensor travels as it is. These are
// pure functions. They neither allocate nor throw, and addresses of elements need no alignment.
#pragma once

#include <cstddef>
#include <span>

#include "compress/codec.h"
#include "core/dtype.h"

namespace bps::compress {

// Turns to.size() elements of a compressible type into float32, exactly.
void widen(Dtype dtype, const std::byte* from, std::span<float> to, Into into = Into::kReplace);
// Rounds to nearest even, as the methods "bf16" and "fp16" do (half.h).
void narrow(Dtype dtype, std::span<const float> from, std::byte* to);

}  // namespace bps::compress
