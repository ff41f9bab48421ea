// SPDX-License-Identifier: Apache-2.0
// Holds the receive requests that all data queue pairs of a loop share. They are empty, since a write brings its own
// address: each stands for one immediate.
//
// Belongs to the thread of the loop. The constructor throws Error.
#pragma once

#include <array>
#include <cstdint>

#include "transport/rdma/capacity.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

class SharedReceiveQueue {
 public:
  SharedReceiveQueue(const Rail& rail, ibv_pd* pd);

  ibv_srq* get() const { return srq_.get(); }
  void count_arrival() { ++missing_; }
  // Posts receives until `kSharedReceives` are there, as soon as enough are missing.
  void repost() {
    if (missing_ >= kRepostBatch) post_missing();
  }
  // Notes that the queue runs low, perhaps because queue pairs that broke took receives with them that nobody counted.
  void note_shortage() { shortage_ = true; }
  // Is called when the completion queue has just been seen empty: it then holds whatever a full queue can bring.
  void settle() {
    if (shortage_) refill();
  }

 private:
  void post_missing();
  void refill();

  Srq srq_;
  bool shortage_ = false;
  std::uint32_t missing_ = kSharedReceives;
  std::array<ibv_recv_wr, kRepostBatch> empty_receives_{};  // a chain, made once
};

}  // namespace bps::transport::rdma
