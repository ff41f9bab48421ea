// SPDX-License-Identifier: Apache-2.0
// Knows one GPU: which memory is its own, what a caller's stream has reached, host memory for its copy engines, and
// what RDMA devices need to read and write its memory themselves (GPUDirect).
//
// All of it works in the device's primary context, which torch and CuPy use as well. A thread that calls the driver
// holds a Current meanwhile, because work for one loop may be done by several threads in turn.
//
// Any thread may use it. A device lives as long as the process; in a forked child its points are left alone. The
// constructor, owner_of(), pin(), block_of() and export_pages() throw kTransport; record() also throws
// kInvalidArgument.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/fd.h"
#include "core/fork.h"
#include "device/driver.h"

namespace bps::device {

class Device;

// Names a point in a stream for which copies can wait. Copies of it are the same point. The device uses the event again
// when the last copy is gone, so that no operation creates one.
class Ready {
 public:
  Ready() = default;
  Ready(const Ready& other) : point_(other.point_) {
    if (point_ != nullptr) point_->users.fetch_add(1, std::memory_order_relaxed);
  }
  Ready(Ready&& other) noexcept : point_(std::exchange(other.point_, nullptr)) {}
  Ready& operator=(Ready other) noexcept {
    std::swap(point_, other.point_);
    return *this;
  }
  ~Ready() {
    if (point_ != nullptr && point_->users.fetch_sub(1, std::memory_order_acq_rel) == 1) give_back();
  }

  // Returns false when there is nothing to wait for.
  explicit operator bool() const { return point_ != nullptr; }
  cuda::Event event() const { return point_->event; }

 private:
  friend class Device;
  struct Point {
    Device* device = nullptr;
    cuda::Event event = nullptr;
    std::atomic<std::uint32_t> users{0};
  };
  void give_back();

  Point* point_ = nullptr;
};

class Device {
 public:
  Device(const Driver& driver, cuda::Ordinal ordinal);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Returns the device that the memory belongs to; nothing for memory of the host, or that CUDA does not know.
  static std::optional<cuda::Ordinal> owner_of(const Driver& driver, const void* memory);

  // Lets the calling thread work in the device's context while it lives. If the device refuses that, because it has
  // failed, the driver's calls return its error. Captures of other threads into CUDA graphs do not concern the thread:
  // no call in between touches a stream that is captured.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Device& device_;
    const bool is_pushed_;
    int capture_mode_;  // the thread's own mode while another one is set
  };

  // Returns the point that this stream has reached now. `stream` is a CUstream as a number, as __cuda_array_interface__
  // has it (1: the legacy default stream). Throws kInvalidArgument for one that is being captured into a CUDA graph.
  Ready record(std::uintptr_t stream);

  // Makes host memory usable for copies that do not stop the caller. Takes some 100 us, once per block.
  void pin(std::span<std::byte> memory) const;
  // Ignores errors: after one of the device all its calls fail.
  void unpin(std::span<std::byte> memory) const noexcept;

  // ---- For RDMA devices
  // Names an allocation of the driver. An identity is never used twice, also where an address is.
  struct Block {
    std::span<std::byte> bytes;
    std::uint64_t identity = 0;
  };
  // Returns the identity of the allocation at this address; nothing where there is none.
  std::optional<std::uint64_t> identity_of(const std::byte* at) const;
  Block block_of(const std::byte* at) const;
  // Makes a dma-buf of whole pages of an allocation.
  Fd export_pages(std::span<std::byte> pages) const;
  // Returns false for a device whose kernels may never see what an RDMA device has written.
  bool can_see_rdma_writes() const;
  // Makes kernels of every device that start from now on see what RDMA devices have written to this one's memory. Does
  // nothing where they see it anyway.
  cuda::Result flush_rdma_writes() const;

  // ---- Errors
  // Makes the error of a device that has failed.
  Error failure(cuda::Result result) const;
  // Makes the error for one call that the driver has refused. The device may well work. `what` is as in "a copy".
  Error refusal(const std::string& what, cuda::Result result) const;

  const Driver& driver() const { return driver_; }
  cuda::Ordinal ordinal() const { return ordinal_; }

 private:
  friend class Ready;
  Ready::Point* take_point();

  const Driver& driver_;
  const cuda::Ordinal ordinal_;
  const std::uint32_t forks_ = fork_count();
  cuda::Context context_ = nullptr;  // never released: it is the process's
  bool is_ordered_ = false;          // kernels see the writes of RDMA devices without a flush
  bool can_flush_ = false;
  std::mutex mutex_;  // guards the next two
  std::vector<std::unique_ptr<Ready::Point>> points_;
  std::vector<Ready::Point*> free_;
};

}  // namespace bps::device
