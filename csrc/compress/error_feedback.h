// SPDX-License-Identifier: Apache-2.0
// Adds what encoding lost in one round to what the next one sends, for any codec, so that over many rounds nothing is
// lost (error feedback, "vanilla").
//
// The residual is the state: one float32 per element that the caller keeps from round to round, zero before the first.
// A checkpoint saves and restores it as it is. A residual that is not finite (a gradient overflowed, perhaps while a
// loss scaler looks for its scale) is set to zero: that round spoils itself, but no later one.
//
// encode_with_feedback() allocates nothing and needs no other memory. Callers keep two threads off one residual.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

// `residual` has gradient.size() elements and `to` has codec.encoded_size() of that; none of them overlap.
void encode_with_feedback(const Codec& codec, std::span<const float> gradient, std::span<float> residual,
                          std::span<std::byte> to, std::uint64_t seed);

}  // namespace bps::compress
