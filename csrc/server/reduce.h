// SPDX-License-Identifier: Apache-2.0
// Sums the partitions of all workers in one pass: step 6 of the walk (docs/internals.md).
//
// reduce() reads every source once and writes every destination once, whatever the number of workers: N sources and M
// destinations cost N + M memory touches. Half types are widened, accumulated in float32 in the order of the sources,
// scaled, and rounded to nearest even once at the end; float32 accumulates in float32, float64 in float64, integers in
// their own width with wrap-around. kAverage divides by `divisor` in that same pass. The sums of integers are wider
// then (integer_mean.h), and the mean is rounded down, as in BytePS. Other ops ignore `divisor`. bool: sum and max are
// OR, product and min are AND; average is refused earlier.
//
// The best instruction set that this machine has is chosen once, at first use. Destinations may be exactly equal to
// sources (in place); other overlap is not allowed. Nothing here allocates or throws. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"

namespace bps::server {

struct Reduction {
  Dtype dtype;
  ReduceOp op;
  std::uint32_t divisor;  // for kAverage, the size of the group; at least 1
};

// Reduces `count` elements. There is at least one source. Without destinations it does nothing. One source with kSum is
// a copy. Pointers need no alignment.
void reduce(const Reduction& what, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
            std::size_t count);

// This is for exact_sum.h, which says what it does.
namespace isa {
struct ExactJob;
}
void run_exactly(Dtype dtype, bool unrounded_result, const isa::ExactJob& job);

// Returns what reduce() uses here: "avx512", "avx2", "neon" or "baseline".
std::string_view reduce_isa();
// These are for tests and benchmarks. The first forces an instruction set, and returns false when this machine lacks
// it.
bool set_reduce_isa(std::string_view isa);
std::span<const std::string_view> available_reduce_isas();

}  // namespace bps::server
