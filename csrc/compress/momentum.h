// SPDX-License-Identifier: Apache-2.0
// Applies Nesterov momentum on the worker, before encoding: m = mu * m + g, and g + mu * m is sent (Sutskever et al.,
// "On the importance of initialization and momentum in deep learning", 2013, as BytePS applies it).
#pragma once

#include <span>

namespace bps::compress {

// Works in place; both have one size, and `momentum` is zero before the first round. Momentum that is not finite is set
// to zero once it has been sent: a round that overflows spoils no later one.
void add_momentum(float mu, std::span<float> momentum, std::span<float> gradient);

}  // namespace bps::compress
