// SPDX-License-Identifier: Apache-2.0
// What an operation on the memory of a GPU has besides.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "device/device.h"

namespace bps::worker {

struct DeviceArrays {
  explicit DeviceArrays(device::Device& of) : device(of) {}
  device::Device& device;
  std::array<device::Ready, 2> ready{};  // points that the device has to reach before it uses the memory
  std::atomic<std::uint32_t> copies{0};  // those under way; one from the memory may outlast the operation
};

}  // namespace bps::worker
