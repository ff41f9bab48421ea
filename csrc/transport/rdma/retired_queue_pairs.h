// SPDX-License-Identifier: Apache-2.0
// Gives queue pairs back to the kernel that the device has stopped working for.
//
// The kernel takes a queue pair back when nothing of it is under way any more. That can last: after a link was set
// down, rxe waits 3 s for packets to an address for which nobody answers. No loop waits for that. A thread does, which
// runs while there is something to give back.
//
// May be used from any thread.
#pragma once

#include <mutex>
#include <thread>
#include <vector>

#include "transport/rdma/completion_queue.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

class RetiredQueuePairs {
 public:
  RetiredQueuePairs() = default;
  RetiredQueuePairs(const RetiredQueuePairs&) = delete;
  RetiredQueuePairs& operator=(const RetiredQueuePairs&) = delete;
  ~RetiredQueuePairs();  // returns when all are given back

  struct Retired {
    CompletionQueue::Reservation sends;
    CompletionQueue::Reservation receives;
    Qp qp;  // goes first
  };
  // Takes one that touches no memory any more.
  void add(Retired one);

 private:
  void give_back();

  std::mutex mutex_;
  std::vector<Retired> waiting_;
  bool runs_ = false;
  std::thread thread_;
};

}  // namespace bps::transport::rdma
