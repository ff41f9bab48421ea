// SPDX-License-Identifier: Apache-2.0
#include "compress/momentum.h"

#include <bit>
#include <cstddef>
#include <cstdint>

namespace bps::compress {
namespace {

bool finite(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7f800000) != 0x7f800000;
}

}  // namespace

void add_momentum(float mu, std::span<float> momentum, std::span<float> gradient) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    momentum[i] = mu * momentum[i] + gradient[i];
    gradient[i] += mu * momentum[i];
    momentum[i] = finite(momentum[i]) ? momentum[i] : 0.0F;
  }
}

}  // namespace bps::compress
