// SPDX-License-Identifier: Apache-2.0
// Makes the kernels for AVX-512 (F, BW, DQ, VL: every server CPU that has any of it since 2017).
#if defined(__AVX512BW__)
#include <immintrin.h>

#include "server/exact_kernels.h"
#include "server/reduce_kernels.h"

namespace bps::server {
namespace {

// Uses the forms with a mask, of all ones here, because gcc 12 warns of what its headers do in the plain ones.
struct Float16 : FloatMath<float> {
  static constexpr std::size_t kParts = 1;
  static constexpr std::size_t kUnitBytes = 32;

  static void load(const std::byte* from, Floats* to) {
    *to = (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store(std::byte* to, const Floats* from) {
    const __m256i half = _mm512_maskz_cvtps_ph(0xffff, (__m512)*from, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
  }
};

}  // namespace

isa::Kernel isa::avx512(Dtype dtype, ReduceOp op) {
  return choose<Float16>(dtype, op);
}

isa::ExactKernel isa::exact_avx512(Dtype dtype, bool unrounded_result) {
  return choose_exact<Converted<Float16>>(dtype, unrounded_result);
}

}  // namespace bps::server
#endif
