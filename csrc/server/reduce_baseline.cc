// SPDX-License-Identifier: Apache-2.0
// Makes the kernels with no more than the architecture guarantees: SSE2 on x86-64.
#include "server/exact_kernels.h"
#include "server/reduce_kernels.h"

namespace bps::server {

isa::Kernel isa::baseline(Dtype dtype, ReduceOp op) {
  return choose<Paired<Float16Bits>>(dtype, op);
}

isa::ExactKernel isa::exact_baseline(Dtype dtype, bool unrounded_result) {
  return choose_exact<InOrder<Float16Bits>>(dtype, unrounded_result);
}

}  // namespace bps::server
