// SPDX-License-Identifier: Apache-2.0
// The kernels with no more than the architecture guarantees: SSE2 on x86-64.
#include "server/reduce_kernels.h"

namespace bps::server {

isa::Kernel isa::baseline(Dtype dtype, ReduceOp op) {
  return choose<Paired<Float16Bits>>(dtype, op);
}

}  // namespace bps::server
