// SPDX-License-Identifier: Apache-2.0
// Makes means of integers. The mean of int8, uint8, int32 or int64 fits its type, but the sum before the division may
// not, so sums are made in a type of twice the width.
//
// The sum of a host, where its ranks are summed before hosts are, travels in the type of the elements.
// fits_integers() says whether it can. Nothing here allocates or throws. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace bps::server {

// Writes the sum of all sources divided by `divisor`, which is at least 1, rounded down. Sources and destinations are
// as those of reduce(), and there is at least one of each. The divisor is not less than the number of summands behind
// the sources.
void average_integers(Dtype dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                      std::size_t count, std::uint32_t divisor);

// Returns true where the sum of all sources fits the type, for each of `count` elements.
bool fits_integers(Dtype dtype, std::span<const std::byte* const> sources, std::size_t count);

}  // namespace bps::server
