// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

namespace bps::device {
namespace {

cuda::Stream stream_of(std::uintptr_t number) {
  return reinterpret_cast<cuda::Stream>(number);  // NOLINT(performance-no-int-to-ptr): CUDA's own encoding
}

}  // namespace

void Ready::give_back() {
  if (point_->device->forks_ != fork_count()) return;  // a thread that is not here may hold the mutex
  const std::lock_guard lock(point_->device->mutex_);
  point_->device->free_.push_back(point_);  // the list has room: take_point() reserves it
}

Device::Device(const Driver& driver, cuda::Ordinal ordinal) : driver_(driver), ordinal_(ordinal) {
  const cuda::Functions& call = driver_.call();
  driver_.check(call.cuDevicePrimaryCtxRetain(&context_, ordinal), "GPU " + std::to_string(ordinal));
  const auto attribute = [&](int which) {
    int value = 0;
    return call.cuDeviceGetAttribute(&value, which, ordinal) == cuda::kSuccess ? value : 0;
  };
  is_ordered_ = attribute(cuda::kDeviceRdmaOrdering) >= cuda::kOrderedForAll;
  can_flush_ = (attribute(cuda::kDeviceRdmaFlushes) & cuda::kFlushByHost) != 0;
}

std::optional<cuda::Ordinal> Device::owner_of(const Driver& driver, const void* memory) {
  const auto at = reinterpret_cast<cuda::Address>(memory);
  unsigned type = 0;
  cuda::Ordinal ordinal = 0;
  const cuda::Functions& call = driver.call();
  if (call.cuPointerGetAttribute(&type, cuda::kPointerMemoryType, at) != cuda::kSuccess) return std::nullopt;
  if (type != cuda::kMemoryOfDevice) return std::nullopt;
  driver.check(call.cuPointerGetAttribute(&ordinal, cuda::kPointerOrdinal, at), "the GPU of an array is unknown");
  return ordinal;
}

Device::Current::Current(const Device& device)
    : device_(device),
      is_pushed_(device.driver_.call().cuCtxPushCurrent_v2(device.context_) == cuda::kSuccess),
      capture_mode_(cuda::kCaptureRelaxed) {
  (void)device.driver_.call().cuThreadExchangeStreamCaptureMode(&capture_mode_);
}

Device::Current::~Current() {
  (void)device_.driver_.call().cuThreadExchangeStreamCaptureMode(&capture_mode_);
  if (!is_pushed_) return;
  cuda::Context popped = nullptr;
  (void)device_.driver_.call().cuCtxPopCurrent_v2(&popped);
}

Ready::Point* Device::take_point() {
  const std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    Ready::Point* point = free_.back();
    free_.pop_back();
    return point;
  }
  auto made = std::make_unique<Ready::Point>();
  made->device = this;
  driver_.check(driver_.call().cuEventCreate(&made->event, cuda::kEventDisableTiming), "cannot create an event");
  points_.push_back(std::move(made));
  free_.reserve(points_.size());
  return points_.back().get();
}

Ready Device::record(std::uintptr_t stream) {
  const Current current(*this);
  auto* const of = stream_of(stream);
  int capture = cuda::kCaptureNone;
  driver_.check(driver_.call().cuStreamIsCapturing(of, &capture), "the stream of an array is not usable");
  if (capture != cuda::kCaptureNone) {
    throw Error(ErrorCode::kInvalidArgument, "the array's stream is being captured into a CUDA graph", kEndCapture);
  }
  Ready ready;
  ready.point_ = take_point();
  ready.point_->users.store(1, std::memory_order_relaxed);
  driver_.check(driver_.call().cuEventRecord(ready.event(), of), "cannot order a copy behind the stream of an array");
  return ready;
}

void Device::pin(std::span<std::byte> memory) const {
  const Current current(*this);
  const cuda::Result result =
      driver_.call().cuMemHostRegister_v2(memory.data(), memory.size(), cuda::kHostPortable | cuda::kHostDeviceMap);
  driver_.check(result, "cannot pin " + std::to_string(memory.size()) + " bytes of host memory");
}

void Device::unpin(std::span<std::byte> memory) const noexcept {
  const Current current(*this);
  (void)driver_.call().cuMemHostUnregister(memory.data());
}

// ---- For RDMA devices

std::optional<std::uint64_t> Device::identity_of(const std::byte* at) const {
  const Current current(*this);
  unsigned long long identity = 0;
  const auto address = reinterpret_cast<cuda::Address>(at);
  if (driver_.call().cuPointerGetAttribute(&identity, cuda::kPointerBuffer, address) != cuda::kSuccess) {
    return std::nullopt;
  }
  return identity;
}

Device::Block Device::block_of(const std::byte* at) const {
  const Current current(*this);
  const auto address = reinterpret_cast<cuda::Address>(at);
  unsigned long long identity = 0;
  cuda::Address begin = 0;
  std::size_t size = 0;
  const cuda::Functions& call = driver_.call();
  driver_.check(call.cuPointerGetAttribute(&identity, cuda::kPointerBuffer, address), "an allocation has no number");
  if (identity == 0) throw Error(ErrorCode::kTransport, "an allocation has no number", "allocate it by cudaMalloc");
  driver_.check(call.cuMemGetAddressRange_v2(&begin, &size, address), "an allocation has no bounds");
  return {{const_cast<std::byte*>(at) - (address - begin), size}, identity};
}

Fd Device::export_pages(std::span<std::byte> pages) const {
  const Current current(*this);
  int made = -1;
  driver_.check(driver_.call().cuMemGetHandleForAddressRange(&made, reinterpret_cast<cuda::Address>(pages.data()),
                                                             pages.size(), cuda::kDmaBuf, 0),
                "cannot make a dma-buf of " + std::to_string(pages.size()) + " bytes");
  return Fd(made);
}

bool Device::can_see_rdma_writes() const {
  return is_ordered_ || can_flush_;
}

cuda::Result Device::flush_rdma_writes() const {
  if (is_ordered_) return cuda::kSuccess;
  const Current current(*this);
  return driver_.call().cuFlushGPUDirectRDMAWrites(cuda::kFlushCurrent, cuda::kOrderedForAll);
}

// ---- Errors

Error Device::failure(cuda::Result result) const {
  return {ErrorCode::kTransport, "GPU " + std::to_string(ordinal_) + " has failed: " + driver_.describe(result),
          "see the kernel log (dmesg) and nvidia-smi for the state of the GPU; this process cannot use it any more"};
}

Error Device::refusal(const std::string& what, cuda::Result result) const {
  const bool captures = cuda::is_of_capture(result);
  return {captures ? ErrorCode::kInvalidArgument : ErrorCode::kTransport,
          "GPU " + std::to_string(ordinal_) + " has refused " + what + ": " + driver_.describe(result),
          captures ? kEndCapture : "see the kernel log (dmesg) and nvidia-smi for the state of the GPU"};
}

}  // namespace bps::device
