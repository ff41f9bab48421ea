// SPDX-License-Identifier: Apache-2.0
// Makes the kernels for AVX2 with F16C.
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

#include "server/exact_kernels.h"
#include "server/reduce_kernels.h"

namespace bps::server {
namespace {

struct Float16 : FloatMath<float> {
  static constexpr std::size_t kParts = 1;
  static constexpr std::size_t kUnitBytes = 16;

  static void load(const std::byte* from, Floats* to) {
    *to = (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(std::byte* to, const Floats* from) {
    const __m128i half = _mm256_cvtps_ph((__m256)*from, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
  }
};

}  // namespace

isa::Kernel isa::avx2(Dtype dtype, ReduceOp op) {
  return choose<Float16>(dtype, op);
}

isa::ExactKernel isa::exact_avx2(Dtype dtype, bool unrounded_result) {
  return choose_exact<Converted<Float16>>(dtype, unrounded_result);
}

}  // namespace bps::server
#endif
