// SPDX-License-Identifier: Apache-2.0
#include "compress/momentum.h"

#include <cstddef>

namespace bps::compress {

void add_momentum(float mu, std::span<float> momentum, std::span<float> gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    momentum[i] = mu * momentum[i] + gradient[i];
    gradient[i] += mu * momentum[i];
  }
}

}  // namespace bps::compress
