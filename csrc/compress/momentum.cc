// SPDX-License-Identifier: Apache-2.0
#include "compress/momentum.h"

#include <cstddef>

#include "compress/float_bits.h"

namespace bps::compress {

void add_momentum(float mu, std::span<float> momentum, std::span<float> gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    momentum[i] = mu * momentum[i] + gradient[i];
    gradient[i] += mu * momentum[i];
    momentum[i] = finite(momentum[i]) ? momentum[i] : 0.0F;
  }
}

}  // namespace bps::compress
