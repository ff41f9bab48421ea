// SPDX-License-Identifier: Apache-2.0
// Defines memory that takes part in transfers: regions of this process, and spans of a peer's. A region belongs to the
// thread of the loop whose transport has registered it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/memory_watch.h"

namespace bps::transport {

// Names memory of a peer in the peer's own notation: by the key that it told us, and an address that counts from the
// region's origin.
struct RemoteSpan {
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
};

// Describes memory of a device of this process, such as a GPU, which no processor touches.
struct ForeignMemory {
  std::span<std::byte> bytes;  // at the addresses that the device has for them; with a descriptor, whole pages
  int dma_buf = -1;  // a descriptor of these pages; -1: the kernel finds them by their addresses (peer memory)
};

// Holds memory of this process that a transport has registered. It stays registered for as long as the object lives.
class Region {
 public:
  explicit Region(std::span<std::byte> bytes) : bytes_(bytes) {}
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  // Returns the part [offset, offset + length) as the peer has to name it on a connection that comes in by `rail`.
  RemoteSpan remote(std::uint64_t offset, std::uint64_t length, std::size_t rail = 0) const {
    return {rail == 0 || other_keys_.empty() ? key_ : other_keys_[rail - 1], origin_ + offset, length};
  }
  std::uint64_t key() const { return key_; }
  // Returns true for memory that no processor may touch.
  bool is_foreign() const { return is_foreign_; }
  // Takes the watch of memory that is the caller's, and that a device uses directly.
  void watch_by(std::unique_ptr<MemoryWatch> watch) { watch_ = std::move(watch); }
  const MemoryWatch* watch() const { return watch_.get(); }
  // Returns true when the device has the pages that the process has. See core/memory_watch.h.
  bool is_current() const { return watch_ == nullptr || watch_->is_intact(); }
  // Returns the keys on the rails after the first, where each rail has a key of its own; else none.
  const std::vector<std::uint64_t>& other_keys() const { return other_keys_; }

 protected:
  std::uint64_t key_ = 0;
  std::uint64_t origin_ = 0;  // a NIC counts from the virtual address, the others from zero
  bool is_foreign_ = false;
  std::vector<std::uint64_t> other_keys_;

 private:
  std::span<std::byte> bytes_;
  std::unique_ptr<MemoryWatch> watch_;  // ends after what derives from this
};

using RegionPtr = std::shared_ptr<Region>;

}  // namespace bps::transport
