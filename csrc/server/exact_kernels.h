// SPDX-License-Identifier: Apache-2.0
// Makes the one pass of an exact sum. It is only for reduce_<isa>.cc; see reduce_math.h for the rules, and exact_sum.h
// for what is computed.
//
// Terms are added in float64, or in float32 where the sum of a few gradients nearly always fits that. A run of elements
// is first added in a way that tells at its end whether the results are right: by exact_directed.h where the processor
// can do that, else by exact_quick.h. If they may be wrong, the run is added again by exact_checked.h.
#pragma once

#include "server/exact_checked.h"
#if defined(__AVX512BW__)
#include "server/exact_directed.h"
#else
#include "server/exact_quick.h"
#endif

namespace bps::server {
namespace {

template <typename Element, bool kUnroundedResult>
void exact_run(const isa::ExactJob& job) {
  constexpr std::size_t kUnits = 4;
  const FloatMath<double>::Divisor divisor(job.divisor);
  Quick<Element, kUnroundedResult> quick(job);
  std::size_t index = 0;
  while (index + kExactUnit <= job.count) {
    if (const std::size_t done = quick.run(index); done != 0) {
      index += done;
      continue;
    }
    // These are as many as were tried together.
    for (std::size_t u = 0; u < kUnits && index + kExactUnit <= job.count; ++u, index += kExactUnit) {
      add_checked<Element, kUnroundedResult>(job, index, divisor, UnitInPlace<Element>{});
    }
  }
  if (index < job.count) {
    add_checked<Element, kUnroundedResult>(job, index, divisor, UnitOfRest<Element>{job.count - index});
  }
}

template <typename Float16, bool kUnroundedResult>
isa::ExactKernel choose_exact(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return exact_run<ExactFloat32, kUnroundedResult>;
    case Dtype::kFloat64: return exact_run<ExactFloat64, kUnroundedResult>;
    case Dtype::kFloat16: return exact_run<ExactHalf<Float16, 11, false>, kUnroundedResult>;
    case Dtype::kBfloat16: return exact_run<ExactBfloat16, kUnroundedResult>;
    default: return nullptr;
  }
}

template <typename Float16>
isa::ExactKernel choose_exact(Dtype dtype, bool unrounded_result) {
  return unrounded_result ? choose_exact<Float16, true>(dtype) : choose_exact<Float16, false>(dtype);
}

}  // namespace
}  // namespace bps::server
