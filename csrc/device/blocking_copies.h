// SPDX-License-Identifier: Apache-2.0
// Copies between the memory of a GPU and the host's, for which the caller waits, a block at a time through pinned
// memory of its own. What a lost server has left of an operation is copied so, after the end of its view; the data path
// has CopyStream.
//
// One thread uses it from its construction to its end. All but the destructor throw kTransport, also if the GPU does
// not end a copy in time. The copies throw what a check of the thread throws, too (core/interrupt.h), between two
// blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "device/copy_stream.h"

namespace bps::device {

class BlockingCopies {
 public:
  static constexpr double kPatience_s = 60;  // nothing but the points holds these copies up

  // The copies come behind these points.
  BlockingCopies(const Device& device, std::span<const Ready> behind, double patience_s = kPatience_s);
  ~BlockingCopies();
  BlockingCopies(const BlockingCopies&) = delete;
  BlockingCopies& operator=(const BlockingCopies&) = delete;

  void to_device(std::byte* to, std::span<const std::byte> from);
  void to_host(std::span<std::byte> to, const std::byte* from);
  // Copies within the device's memory.
  void within(std::byte* to, const std::byte* from, std::size_t size);
  // Returns true when a copy may still be under way, after an error. Then the device's memory is to be kept for ever.
  bool hangs() const { return hangs_; }

 private:
  void check(cuda::Result result) const;
  // Waits for copies that have been put. One that is not the first of them may have been refused.
  void finish(cuda::Result put);

  const Device& device_;
  const Device::Current current_;
  const double patience_s_;
  std::unique_ptr<CopyStream> stream_;
  std::byte* block_ = nullptr;
  bool hangs_ = false;  // the GPU may still read or write the block, and what it is copied from or to
};

}  // namespace bps::device
