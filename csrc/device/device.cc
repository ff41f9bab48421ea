// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"

#include "core/error.h"

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
  driver_.check(driver_.call().cuDevicePrimaryCtxRetain(&context_, ordinal), "GPU " + std::to_string(ordinal));
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

}  // namespace bps::device
