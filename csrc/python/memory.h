// SPDX-License-Identifier: Apache-2.0
// Describes the bytes of an array, as the core needs to know them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "core/dtype.h"
#include "device/device.h"
#include "transport/region_cache.h"

namespace bps::python {

struct Memory {
  std::byte* address = nullptr;
  std::uint64_t nbytes = 0;
  std::uint64_t elements = 0;
  Dtype dtype{};
  transport::Allocation block;  // the allocation around the array, which is registered as a whole; or a GPU's array
  pybind11::object keep;        // the array, which must live while its memory is in use
  device::Device* device = nullptr;  // the device whose memory it is; null: the host's
  std::uintptr_t stream = 0;         // the stream of the device in which the array is made and used
};

}  // namespace bps::python
