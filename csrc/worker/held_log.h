// SPDX-License-Identifier: Apache-2.0
// Holds the redo log of a server on this host, so that it can be read when the server is gone. Belongs to the loop's
// thread.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "tensor/redo_log.h"
#include "transport/shm/shared_memory.h"

namespace bps::worker {

class HeldLog {
 public:
  void hold(std::shared_ptr<transport::shm::SharedMemory> memory) {
    memory_ = std::move(memory);
    if (memory_) log_.emplace(memory_->bytes());
  }
  bool is_held() const { return log_.has_value(); }
  const tensor::RedoLog& log() const { return *log_; }

 private:
  std::shared_ptr<transport::shm::SharedMemory> memory_;
  std::optional<tensor::RedoLog> log_;
};

}  // namespace bps::worker
