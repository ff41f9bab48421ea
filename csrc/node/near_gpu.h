// SPDX-License-Identifier: Apache-2.0
// Finds the GPU of a process, as far as that decides which RDMA devices it uses (BPS_RDMA_NEAR_GPU).
//
// Rails are opened by init(), before any array. So the GPU is that of the calling thread's CUDA context, as
// torch.cuda.set_device() leaves one behind; else the only one that the process sees; else the one whose number is the
// local rank. Where none of them says, or there is a single RDMA device, nothing changes.
#pragma once

#include "core/settings.h"
#include "transport/rdma/rail.h"

namespace bps::node {

// Returns the options of RDMA with that GPU. Only a process that `may_choose` has one. Throws kInvalidArgument for a
// setting that is not understood or names no GPU, and kTransport where it names one and there is no driver.
transport::rdma::RdmaOptions rdma_options(const Settings& settings, bool may_choose);

}  // namespace bps::node
