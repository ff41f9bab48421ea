// SPDX-License-Identifier: Apache-2.0
// Reads and writes the arrays of an operation that no loop works on any more, wherever they lie: in the host's memory,
// or in that of a GPU, which copies while its caller waits (device/blocking_copies.h). A copy that hangs counts as one
// that is under way, so that the arrays are kept. One thread uses it.
#pragma once

#include <cstring>
#include <optional>
#include <span>

#include "device/blocking_copies.h"
#include "worker/device_arrays.h"

namespace bps::worker {

class CallersMemory {
 public:
  // `on_device` is null for arrays in the host's memory.
  explicit CallersMemory(DeviceArrays* on_device, double patience_s = device::BlockingCopies::kPatience_s)
      : on_device_(on_device), patience_s_(patience_s) {}
  ~CallersMemory() {
    if (by_device_ && by_device_->hangs()) on_device_->copies.fetch_add(1);
  }
  CallersMemory(const CallersMemory&) = delete;
  CallersMemory& operator=(const CallersMemory&) = delete;

  void read(std::span<std::byte> to, const std::byte* from) {
    if (to.empty()) return;
    on_device_ != nullptr ? by_device().to_host(to, from) : copy(to.data(), from, to.size());
  }
  void write(std::byte* to, std::span<const std::byte> from) {
    if (from.empty()) return;
    on_device_ != nullptr ? by_device().to_device(to, from) : copy(to, from.data(), from.size());
  }
  // Copies from one array to the other, where they are a GPU's.
  void move(std::byte* to, const std::byte* from, std::size_t size) { by_device().within(to, from, size); }

 private:
  static void copy(std::byte* to, const std::byte* from, std::size_t size) { std::memcpy(to, from, size); }
  // A GPU is not touched before something is to be copied.
  device::BlockingCopies& by_device() {
    if (!by_device_) by_device_.emplace(on_device_->device, on_device_->ready, patience_s_);
    return *by_device_;
  }

  DeviceArrays* const on_device_;
  const double patience_s_;
  std::optional<device::BlockingCopies> by_device_;
};

}  // namespace bps::worker
