// SPDX-License-Identifier: Apache-2.0
// Queue pairs that the device has stopped working for, on their way back to the kernel.
//
// The kernel gives a queue pair back when nothing of it is under way any more. That can last: rxe waits for packets
// that wait for an address which nobody answers for, 3 s after a link was set down. No loop waits for that: a thread
// does, which runs while there is something to give back.
//
// Threading: any thread.
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
  ~RetiredQueuePairs();  // when all are given back

  struct Retired {
    CompletionQueue::Reservation sends;
    CompletionQueue::Reservation receives;
    Qp qp;  // goes first
  };
  // One that touches no memory any more.
  void add(Retired one);

 private:
  void give_back();

  std::mutex mutex_;
  std::vector<Retired> waiting_;
  bool runs_ = false;
  std::thread thread_;
};

}  // namespace bps::transport::rdma
