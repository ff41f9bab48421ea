// SPDX-License-Identifier: Apache-2.0
#include "compress/error_feedback.h"

#include "compress/float_bits.h"

namespace bps::compress {

void encode_with_feedback(const Codec& codec, std::span<const float> gradient, std::span<float> residual,
                          std::span<std::byte> to, std::uint64_t seed) {
  for (std::size_t i = 0; i < residual.size(); ++i) residual[i] += gradient[i];
  codec.encode(residual, to, seed);
  // A codec accepts what it has just written.
  static_cast<void>(codec.decode(to, residual, Into::kSubtract));
  for (float& value : residual) value = finite(value) ? value : 0.0F;
}

}  // namespace bps::compress
