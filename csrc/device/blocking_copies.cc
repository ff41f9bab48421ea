// SPDX-License-Identifier: Apache-2.0
#include "device/blocking_copies.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "core/interrupt.h"

namespace bps::device {
namespace {

constexpr std::size_t kBlock = 4 << 20;
constexpr double kHangs_s = 60;  // nothing but the points holds these copies up
constexpr auto kLook = std::chrono::microseconds(100);

}  // namespace

BlockingCopies::BlockingCopies(const Device& device, std::span<const Ready> behind)
    : device_(device), current_(device), stream_(std::make_unique<CopyStream>(device, CopyStream::kNoDoorbell)) {
  void* memory = nullptr;
  check(device.driver().call().cuMemHostAlloc(&memory, kBlock, cuda::kHostPortable | cuda::kHostDeviceMap));
  block_ = static_cast<std::byte*>(memory);
  try {
    for (const Ready& point : behind) check(stream_->wait_for(point));
  } catch (const Error&) {
    (void)device_.driver().call().cuMemFreeHost(block_);
    throw;
  }
}

BlockingCopies::~BlockingCopies() {
  if (!hangs_) (void)device_.driver().call().cuMemFreeHost(block_);
}

void BlockingCopies::to_device(std::byte* to, std::span<const std::byte> from) {
  for (std::size_t at = 0; at < from.size(); at += kBlock) {
    const std::size_t size = std::min(kBlock, from.size() - at);
    std::memcpy(block_, from.data() + at, size);
    check(stream_->to_device(to + at, block_, size));
    finish();
  }
}

void BlockingCopies::to_host(std::span<std::byte> to, const std::byte* from) {
  for (std::size_t at = 0; at < to.size(); at += kBlock) {
    const std::size_t size = std::min(kBlock, to.size() - at);
    check(stream_->to_host(block_, from + at, size));
    finish();
    std::memcpy(to.data() + at, block_, size);
  }
}

void BlockingCopies::within(std::byte* to, const std::byte* from, std::size_t size) {
  for (std::size_t at = 0; at < size; at += kBlock) {
    const std::size_t some = std::min(kBlock, size - at);
    check(stream_->to_host(block_, from + at, some));
    hangs_ = true;  // until finish()
    check(stream_->to_device(to + at, block_, some));
    finish();
  }
}

void BlockingCopies::check(cuda::Result result) const {
  if (result != cuda::kSuccess) throw Error(device_.refusal("a copy", result));
}

// Waits for the copy that was put last. It is not given up before it has ended, as it changes memory of the caller.
void BlockingCopies::finish() {
  hangs_ = true;
  for (const Deadline until = Deadline::after(kHangs_s);; std::this_thread::sleep_for(kLook)) {
    const cuda::Result state = stream_->state();
    if (state == cuda::kSuccess) break;
    if (state != cuda::kNotReady) {
      hangs_ = false;  // nothing on a device goes on after an error of it
      throw Error(device_.failure(state));
    }
    if (!until.passed()) continue;
    throw Error(ErrorCode::kTimeout, "GPU " + std::to_string(device_.ordinal()) + " has not ended a copy for a minute",
                "see the kernel log (dmesg) and nvidia-smi for the state of the GPU");
  }
  hangs_ = false;
  check_interrupt();
}

}  // namespace bps::device
