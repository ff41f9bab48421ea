// SPDX-License-Identifier: Apache-2.0
// Keeps the memory that a worker loop has registered with one transport: the callers' blocks, those of GPUs, and
// staging buffers.
//
// Payloads and answers take a staging buffer where the tensor's memory cannot be used, or not yet (choose_route() tells
// when), and where they are encoded. A partition is copied, or encoded, into it before the push and out of it after the
// answer. A relay sums what its host contributes straight into a buffer. Buffers are made, and registered, by reserve()
// when an operation is admitted, and one by one by add_buffer(): up to the budget when a partition could be sent,
// beyond it only when waiting for a free one could last for ever because ranks push in different orders. They are never
// given back. One thread uses it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/device.h"
#include "transport/region_cache.h"
#include "transport/shm/shared_memory.h"
#include "worker/device_regions.h"

namespace bps::worker {

class Operation;
class ServerConnection;
class Transfer;

struct StagingBuffer {
  std::shared_ptr<transport::shm::SharedMemory> memory;
  transport::RegionPtr region;
  std::byte* bytes() const { return memory->bytes().data(); }
  StagingBuffer* next = nullptr;  // in the list of Transfer::encoded, or of a device's copies
  const device::Device* pinned_by = nullptr;
  bool is_encoded = false;  // on the way from a device: the codec has had it
  struct Copy {             // what a device copies to the buffer or from it
    std::shared_ptr<Operation> of;
    Transfer* transfer = nullptr;
    ServerConnection* server = nullptr;
    std::uint32_t entry = 0;  // in the table of partitions in flight; on the way out the place among Transfer::parts
    std::uint32_t mark = 0;
    std::uint32_t begins_at = 0;  // the mark after which it begins, for traces; 0: nobody wants to know, or is told
    bool is_refused = false;      // the driver may have taken it or not, so that its bytes do not count
  };
  Copy copy{};

  // Makes each of two buffers lie where the other one lies, with all that their bytes are.
  void swap_bytes(StagingBuffer& other) {
    std::swap(memory, other.memory);
    std::swap(region, other.region);
    std::swap(pinned_by, other.pinned_by);
  }
};

class TransportMemory {
 public:
  TransportMemory(transport::Transport& transport, std::size_t buffer_bytes, std::size_t staging_budget)
      : regions(transport, kCachedRegions),
        device_regions(transport),
        transport_(transport),
        buffer_bytes_(buffer_bytes),
        most_buffers_(std::max<std::size_t>(2, buffer_bytes == 0 ? 0 : staging_budget / buffer_bytes)) {}

  ~TransportMemory() {
    for (const StagingBuffer& buffer : buffers_) unpin(buffer);
    if (spare_) unpin(*spare_);
  }
  TransportMemory(const TransportMemory&) = delete;
  TransportMemory& operator=(const TransportMemory&) = delete;

  transport::Transport& transport() const { return transport_; }

  // These are set-up, and throw what registering memory throws.
  void reserve(std::size_t buffers) {
    while (buffers_.size() < std::min(buffers, most_buffers_)) add_buffer();
  }
  // Makes the buffers that there are usable for copies of every device. It is set-up, and throws; the buffers before
  // the one that failed stay usable.
  void pin(const device::Device& device) {
    for (; pinned_ < buffers_.size(); ++pinned_) pin(buffers_[pinned_], device);
    if (spare_) pin(*spare_, device);
  }
  static void pin(StagingBuffer& buffer, const device::Device& device) {
    if (buffer.pinned_by != nullptr) return;
    device.pin(buffer.memory->bytes());
    buffer.pinned_by = &device;
  }
  bool may_grow() const { return buffers_.size() < most_buffers_; }
  void add_buffer() {
    StagingBuffer made = make_buffer();
    free_.reserve(buffers_.size() + 1);
    buffers_.push_back(std::move(made));
    free_.push_back(&buffers_.back());
  }
  // Makes the spare buffer, for codecs of what a device copies. It is set-up, and throws.
  void make_spare() {
    if (!spare_) spare_ = make_buffer();
  }
  // Returns the buffer that no partition has. A codec reads what a device has copied, or what it is to copy, in another
  // buffer and writes to this one, and then the two swap their bytes.
  StagingBuffer& spare() { return *spare_; }

  bool has_free() const { return !free_.empty(); }
  std::size_t in_use() const { return buffers_.size() - free_.size(); }
  // Returns nullptr when all are in use.
  StagingBuffer* take() {
    if (free_.empty()) return nullptr;
    StagingBuffer* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }
  void give_back(StagingBuffer* buffer) { free_.push_back(buffer); }

  // Counts callers' blocks and staging buffers. Walks through the blocks.
  std::uint64_t registered_bytes() const {
    return regions.bytes() + device_regions.bytes() + (buffers_.size() + (spare_ ? 1 : 0)) * buffer_bytes_;
  }

  transport::RegionCache regions;
  DeviceRegions device_regions;

 private:
  static constexpr std::size_t kCachedRegions = 4096;  // an entry is a table row, except on a NIC

  StagingBuffer make_buffer() {
    StagingBuffer made{transport::shm::SharedMemory::create(buffer_bytes_), nullptr};
    made.region = transport_.register_memory(made.memory->bytes());
    return made;
  }
  static void unpin(const StagingBuffer& buffer) {
    if (buffer.pinned_by != nullptr) buffer.pinned_by->unpin(buffer.memory->bytes());
  }

  transport::Transport& transport_;
  const std::size_t buffer_bytes_;
  const std::size_t most_buffers_;
  std::deque<StagingBuffer> buffers_;  // a deque: addresses stay
  std::size_t pinned_ = 0;             // all buffers before this index are pinned, and some later ones may be
  std::vector<StagingBuffer*> free_;
  std::optional<StagingBuffer> spare_;
};

}  // namespace bps::worker
