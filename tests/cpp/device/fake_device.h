// SPDX-License-Identifier: Apache-2.0
// Gives tests the fake driver: FAKE(function), of those that fake_cuda.h declares, and its only device.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include "device/devices.h"
#include "device/fake_cuda.h"

namespace bps::device::testing {

// Finds the function in the very library that the driver has opened.
template <typename F>
F* control(F*, const char* name) {
  static void* const opened = ::dlopen(BPS_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<F*>(::dlsym(opened, name));
}
#define FAKE(name) bps::device::testing::control(decltype (&name)(nullptr), #name)

// Returns one device for all tests: a process has one, whose points outlive the test.
inline Device& only_device() {
  static Device& device = []() -> Device& {
    void* const memory = FAKE(fake_allocate)(1);
    Device& found = *find_owner(BPS_FAKE_CUDA, memory);
    FAKE(fake_free)(memory);
    return found;
  }();
  return device;
}

// Makes a stream of a caller. It has a thread, which would be in the way of later tests that fork.
class CallersStream {
 public:
  CallersStream() = default;
  ~CallersStream() { FAKE(fake_end_stream)(stream_); }
  CallersStream(const CallersStream&) = delete;
  CallersStream& operator=(const CallersStream&) = delete;

  void* get() const { return stream_; }
  std::uintptr_t number() const { return reinterpret_cast<std::uintptr_t>(stream_); }

 private:
  void* const stream_ = FAKE(fake_stream)();
};

}  // namespace bps::device::testing
