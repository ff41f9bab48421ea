// SPDX-License-Identifier: Apache-2.0
// Copies between the memory of a GPU and the host's, for which the caller waits, a block at a time through pinned
// memory of its own. What a lost server has left of an operation is copied so, after the end of its view; the data path
// has CopyStream.
//
// One thread uses it from its construction to its end. All but the destructor throw kTransport; the copies throw
// kTimeout, too, if the GPU does not end one within a minute, and what a check of the thread throws between two blocks
// (core/interrupt.h). Only then may a copy still be under way when a function has ended.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "device/copy_stream.h"

namespace bps::device {

class BlockingCopies {
 public:
  // The copies come behind these points.
  BlockingCopies(const Device& device, std::span<const Ready> behind);
  ~BlockingCopies();
  BlockingCopies(const BlockingCopies&) = delete;
  BlockingCopies& operator=(const BlockingCopies&) = delete;

  void to_device(std::byte* to, std::span<const std::byte> from);
  void to_host(std::span<std::byte> to, const std::byte* from);
  // Copies within the device's memory.
  void within(std::byte* to, const std::byte* from, std::size_t size);

 private:
  void check(cuda::Result result) const;
  void finish();

  const Device& device_;
  const Device::Current current_;
  std::unique_ptr<CopyStream> stream_;
  std::byte* block_ = nullptr;
  bool hangs_ = false;  // the GPU may still read or write the block
};

}  // namespace bps::device
