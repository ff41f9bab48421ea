// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/retired_queue_pairs.h"

#include <exception>
#include <utility>

#include "core/log.h"

namespace bps::transport::rdma {

RetiredQueuePairs::~RetiredQueuePairs() {
  if (thread_.joinable()) thread_.join();
}

void RetiredQueuePairs::add(Retired one) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(one));
  if (runs_) return;
  if (thread_.joinable()) thread_.join();  // it has let go of the mutex for the last time
  try {
    thread_ = std::thread([this] { give_back(); });
    runs_ = true;
  } catch (const std::exception&) {
    waiting_.clear();  // there are no more threads to be had, so this happens here and now
  }
}

void RetiredQueuePairs::give_back() {
  name_thread("bps-retired");
  for (;;) {
    std::vector<Retired> now;
    {
      const std::lock_guard lock(mutex_);
      std::swap(now, waiting_);
      if (now.empty()) {
        runs_ = false;
        return;
      }
    }
  }
}

}  // namespace bps::transport::rdma
