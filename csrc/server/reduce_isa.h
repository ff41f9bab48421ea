// SPDX-License-Identifier: Apache-2.0
// The instruction-set files of the reducer give reduce.cc one function each, which names a kernel.
//
// Those files are compiled with flags that this machine may not honour. So that none of their code can leak into the
// rest of the program, they may not instantiate inline functions or templates of namespaces that other files use (the
// linker keeps one copy of each, perhaps theirs): everything in them but the functions below has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace bps::server::isa {

struct Job {
  const std::byte* const* sources;
  std::size_t source_count;  // at least 1
  std::byte* const* destinations;
  std::size_t destination_count;
  std::size_t bytes;      // the length of each source and destination
  std::uint32_t divisor;  // at least 1, also for operations that ignore it
};

using Kernel = void (*)(const Job&);

// These return null when there is no such combination.
Kernel baseline(Dtype dtype, ReduceOp op);
Kernel avx2(Dtype dtype, ReduceOp op);
Kernel avx512(Dtype dtype, ReduceOp op);
Kernel neon(Dtype dtype, ReduceOp op);

// Describes a sum without rounding, which is divided, and rounded once: see exact_sum.h.
struct ExactJob {
  const std::byte* const* sources;
  const bool* unrounded;  // which of them are float64, whatever the element type
  std::size_t source_count;
  std::byte* const* destinations;  // each may be one of the sources
  std::size_t destination_count;
  std::size_t count;      // elements
  std::uint32_t divisor;  // at least 1, and less than 2^21
  // Returns the value of an element that a sum in float64 has not given. It is still rounded to the element type.
  double (*repair)(void* context, std::size_t index);
  void* context;
  bool to_odd = false;  // for float64: what would be rounded is left to repair()
};

using ExactKernel = void (*)(const ExactJob&);

// These return null for what is no floating point. With `unrounded_result` destinations are float64, and there is no
// divisor.
ExactKernel exact_baseline(Dtype dtype, bool unrounded_result);
ExactKernel exact_avx2(Dtype dtype, bool unrounded_result);
ExactKernel exact_avx512(Dtype dtype, bool unrounded_result);
ExactKernel exact_neon(Dtype dtype, bool unrounded_result);

}  // namespace bps::server::isa
