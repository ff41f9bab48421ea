// SPDX-License-Identifier: Apache-2.0
// Makes the kernels for AArch64, where NEON and conversions to and from half precision are always there.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "server/exact_kernels.h"
#include "server/reduce_kernels.h"

namespace bps::server {
namespace {

struct Float16 : FloatMath<float> {
  static constexpr std::size_t kParts = 2;
  static constexpr std::size_t kUnitBytes = 16;

  static void load(const std::byte* from, Floats* to) {
    float16x8_t half;
    __builtin_memcpy(&half, from, sizeof half);
    to[0] = (Floats)vcvt_f32_f16(vget_low_f16(half));
    to[1] = (Floats)vcvt_high_f32_f16(half);
  }
  static void store(std::byte* to, const Floats* from) {
    const float16x8_t half = vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t)from[0]), (float32x4_t)from[1]);
    __builtin_memcpy(to, &half, sizeof half);
  }
};

}  // namespace

isa::Kernel isa::neon(Dtype dtype, ReduceOp op) {
  return choose<Float16>(dtype, op);
}

isa::ExactKernel isa::exact_neon(Dtype dtype, bool unrounded_result) {
  return choose_exact<InOrder<Float16Bits>>(dtype, unrounded_result);
}

}  // namespace bps::server
#endif
