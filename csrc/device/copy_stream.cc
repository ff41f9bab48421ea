// SPDX-License-Identifier: Apache-2.0
#include "device/copy_stream.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "core/error.h"
#include "core/fd.h"

namespace bps::device {
namespace {

// Makes no call of the driver, which would be an error here. The argument is the descriptor itself, so that there is
// nothing whose life could end before the call.
void ring_doorbell(void* doorbell) {
  ring(static_cast<int>(reinterpret_cast<std::intptr_t>(doorbell)));
}

}  // namespace

CopyStream::CopyStream(const Device& device, int doorbell) : device_(device) {
  const Driver& driver = device.driver();
  driver.check(driver.call().cuStreamCreateWithPriority(&stream_, cuda::kStreamNonBlocking, 0),
               "cannot create a stream for copies");
  void* memory = nullptr;
  cuda::Result result =
      driver.call().cuMemHostAlloc(&memory, sizeof *flag_, cuda::kHostPortable | cuda::kHostDeviceMap);
  if (result == cuda::kSuccess) {
    flag_ = static_cast<std::uint32_t*>(memory);
    __atomic_store_n(flag_, 0, __ATOMIC_RELEASE);
    result = driver.call().cuMemHostGetDevicePointer_v2(&flag_at_, memory, 0);
  }
  if (result == cuda::kSuccess) {
    if (doorbell == kNoDoorbell) return;
    doorbell_ = ::fcntl(doorbell, F_DUPFD_CLOEXEC, 0);
    if (doorbell_ >= 0) return;
  }
  if (flag_ != nullptr) (void)driver.call().cuMemFreeHost(flag_);
  (void)driver.call().cuStreamDestroy_v2(stream_);
  driver.check(result, "cannot make a flag that the GPU writes");
  throw_errno("cannot duplicate a descriptor");
}

CopyStream::~CopyStream() {
  // The stream and its flag are kept if the device is late: freeing either waits for the device, and a job that is lost
  // must not hang in that.
  if (!drain(Deadline::after(kLongestEnd_s))) return;
  (void)device_.driver().call().cuStreamDestroy_v2(stream_);
  (void)device_.driver().call().cuMemFreeHost(flag_);
  if (doorbell_ >= 0) ::close(doorbell_);
}

cuda::Result CopyStream::wait_for(const Ready& ready) {
  if (!ready) return cuda::kSuccess;
  return device_.driver().call().cuStreamWaitEvent(stream_, ready.event(), 0);
}

cuda::Result CopyStream::to_host(std::byte* to, const std::byte* from, std::size_t size) {
  return device_.driver().call().cuMemcpyDtoHAsync_v2(to, reinterpret_cast<cuda::Address>(from), size, stream_);
}

cuda::Result CopyStream::to_device(std::byte* to, const std::byte* from, std::size_t size) {
  return device_.driver().call().cuMemcpyHtoDAsync_v2(reinterpret_cast<cuda::Address>(to), from, size, stream_);
}

cuda::Result CopyStream::mark() {
  return device_.driver().call().cuStreamWriteValue32_v2(stream_, flag_at_, ++marks_, 0);
}

bool CopyStream::reached(std::uint32_t mark) const {
  const std::uint32_t flag = __atomic_load_n(flag_, __ATOMIC_ACQUIRE);
  return static_cast<std::int32_t>(flag - mark) >= 0;
}

cuda::Result CopyStream::ring_at_last_mark() {
  if (rings_at_ == marks_) return cuda::kSuccess;
  const cuda::Result result = device_.driver().call().cuLaunchHostFunc(
      stream_, &ring_doorbell, reinterpret_cast<void*>(static_cast<std::intptr_t>(doorbell_)));
  if (result == cuda::kSuccess) rings_at_ = marks_;
  return result;
}

cuda::Result CopyStream::state() const {
  const cuda::Result result = device_.driver().call().cuStreamQuery(stream_);
  return cuda::is_of_capture(result) ? cuda::kNotReady : result;  // the error of a capture says nothing of the stream
}

cuda::Result CopyStream::settle() {
  const cuda::Result result = state();
  // The device writes to the flag only for what is in the stream.
  if (result == cuda::kSuccess && !reached(marks_)) __atomic_store_n(flag_, marks_, __ATOMIC_RELEASE);
  return result;
}

bool CopyStream::drain(const Deadline& until) const {
  for (;;) {
    // Nothing on a device goes on after an error of it.
    if (state() != cuda::kNotReady) return true;
    if (until.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a job ends here, so nobody is in a hurry
  }
}

}  // namespace bps::device
