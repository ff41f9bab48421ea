// Buffers that every same-host server can map, for tensors that it cannot reach: plain memory where the kernel forbids
// cross-memory copies. A partition is copied in before the push and out after the answer.
//
// Threading: one thread. The pool grows buffer by buffer up to its budget; grow() goes beyond it, which the worker_loop
// asks for when waiting could last for ever (ranks that push in different orders).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/region_cache.h"
#include "transport/shm/shared_memory.h"

namespace bps::worker {

class Staging {
 public:
  Staging(std::size_t buffer_bytes, std::size_t budget) : buffer_bytes_(buffer_bytes), budget_(budget) {}

  // nullptr when all buffers are in use and the budget is spent.
  std::byte* take() {
    if (free_.empty() && (buffers_.size() + 1) * buffer_bytes_ <= std::max(budget_, 2 * buffer_bytes_)) grow();
    if (free_.empty()) return nullptr;
    std::byte* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void give_back(std::byte* buffer) { free_.push_back(buffer); }
  void grow() {
    buffers_.push_back(transport::shm::SharedMemory::create(buffer_bytes_));
    free_.push_back(buffers_.back()->bytes().data());
  }
  // Buffers stay, so that their addresses tell them apart; the bit tells them from users' blocks.
  transport::Allocation block_of(std::byte* buffer) const {
    return {{buffer, buffer_bytes_}, std::uint64_t{1} << 63 | reinterpret_cast<std::uintptr_t>(buffer)};
  }

 private:
  const std::size_t buffer_bytes_;
  const std::size_t budget_;
  std::vector<std::shared_ptr<transport::shm::SharedMemory>> buffers_;
  std::vector<std::byte*> free_;
};

}  // namespace bps::worker
