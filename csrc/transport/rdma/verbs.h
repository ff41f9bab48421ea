// SPDX-License-Identifier: Apache-2.0
// Makes verbs objects release themselves. Each must go before what it was made from: a class holds them in the order in
// which they are made.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <memory>

extern "C" {
// Headers before rdma-core 34 lack it, and a library of that time answers with ENOSYS.
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
}

namespace bps::transport::rdma {

template <auto Release>
struct Released {
  template <typename T>
  void operator()(T* object) const {
    Release(object);
  }
};
template <typename T, auto Release>
using Verb = std::unique_ptr<T, Released<Release>>;

using VerbsContext = Verb<ibv_context, ibv_close_device>;
using Pd = Verb<ibv_pd, ibv_dealloc_pd>;
using Mr = Verb<ibv_mr, ibv_dereg_mr>;
using CompChannel = Verb<ibv_comp_channel, ibv_destroy_comp_channel>;
using Cq = Verb<ibv_cq, ibv_destroy_cq>;
using Srq = Verb<ibv_srq, ibv_destroy_srq>;
using Qp = Verb<ibv_qp, ibv_destroy_qp>;
using CmChannel = Verb<rdma_event_channel, rdma_destroy_event_channel>;
using CmId = Verb<rdma_cm_id, rdma_destroy_id>;

}  // namespace bps::transport::rdma
