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
constexpr auto kLook = std::chrono::microseconds(100);

}  // namespace

BlockingCopies::BlockingCopies(const Device& device, std::span<const Ready> behind, double patience_s)
    : device_(device),
      current_(device),
      patience_s_(patience_s),
      stream_(std::make_unique<CopyStream>(device, CopyStream::kNoDoorbell)) {
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
  if (hangs_ && !stream_->drain(Deadline::after(kLongestEnd_s))) return;  // the GPU may write to the block for ever
  (void)device_.driver().call().cuMemFreeHost(block_);
}

void BlockingCopies::to_device(std::byte* to, std::span<const std::byte> from) {
  for (std::size_t at = 0; at < from.size(); at += kBlock) {
    const std::size_t size = std::min(kBlock, from.size() - at);
    std::memcpy(block_, from.data() + at, size);
    finish(stream_->to_device(to + at, block_, size));
  }
}

void BlockingCopies::to_host(std::span<std::byte> to, const std::byte* from) {
  for (std::size_t at = 0; at < to.size(); at += kBlock) {
    const std::size_t size = std::min(kBlock, to.size() - at);
    finish(stream_->to_host(block_, from + at, size));
    std::memcpy(to.data() + at, block_, size);
  }
}

void BlockingCopies::within(std::byte* to, const std::byte* from, std::size_t size) {
  for (std::size_t at = 0; at < size; at += kBlock) {
    const std::size_t some = std::min(kBlock, size - at);
    cuda::Result put = stream_->to_host(block_, from + at, some);
    if (put == cuda::kSuccess) put = stream_->to_device(to + at, block_, some);
    finish(put);
  }
}

void BlockingCopies::check(cuda::Result result) const {
  if (result != cuda::kSuccess) throw Error(device_.refusal("a copy", result));
}

// The copies are not given up before they have ended, as they change memory of the caller. Of one that was refused the
// driver may have taken a part all the same.
void BlockingCopies::finish(cuda::Result put) {
  hangs_ = true;
  for (const Deadline until = Deadline::after(patience_s_);; std::this_thread::sleep_for(kLook)) {
    const cuda::Result state = stream_->state();
    if (state != cuda::kNotReady) {
      hangs_ = false;  // nothing on a device goes on after an error of it
      if (state != cuda::kSuccess) throw Error(device_.failure(state));
      break;
    }
    if (!until.passed()) continue;
    throw Error(ErrorCode::kTransport, "GPU " + std::to_string(device_.ordinal()) + " does not end a copy",
                "see the kernel log (dmesg) and nvidia-smi for the state of the GPU");
  }
  check(put);
  check_interrupt();
}

}  // namespace bps::device
