// SPDX-License-Identifier: Apache-2.0
// Keeps a GPU's memory registered with RDMA devices, by allocation of CUDA's driver.
//
// An allocation is registered as a whole when an array in it is first used: by a dma-buf, or else, where the kernel's
// module nvidia_peermem is loaded, by its addresses. One that cannot be registered is staged from then on, and the
// first time the log says why. A registration counts for one allocation only, which has a number that no other one ever
// gets: the number is compared at each use, so that an address that is used again is registered anew. Registrations
// whose allocation has been freed are dropped by drop_freed(), and keep the memory until then. Belongs to the loop's
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "device/device.h"
#include "transport/transport.h"

namespace bps::worker {

class DeviceRegions {
 public:
  // `modules` is the folder in which the kernel lists its modules.
  explicit DeviceRegions(transport::Transport& transport, std::string modules = "/sys/module")
      : transport_(transport), modules_(std::move(modules)) {}

  // Returns the region around these bytes, or null where they have to be staged. It is set-up.
  transport::RegionPtr find(const device::Device& device, std::span<std::byte> bytes);
  void drop_freed();
  std::uint64_t bytes() const;

 private:
  struct Entry {
    const device::Device* device;
    device::Device::Block block;
    transport::RegionPtr region;  // null: it is staged
    bool holds(std::span<std::byte> bytes) const {
      return bytes.data() >= block.bytes.data() && bytes.size() <= block.bytes.size() &&
             bytes.data() - block.bytes.data() <= static_cast<std::ptrdiff_t>(block.bytes.size() - bytes.size());
    }
    bool is_current() const { return device->identity_of(block.bytes.data()) == block.identity; }
  };
  transport::RegionPtr make(const device::Device& device, const device::Device::Block& block);

  transport::Transport& transport_;
  const std::string modules_;
  std::map<const std::byte*, Entry> by_address_;
};

}  // namespace bps::worker
