// SPDX-License-Identifier: Apache-2.0
#include "device/driver.h"

#include <dlfcn.h>

#include "core/error.h"

namespace bps::device {
namespace {

constexpr const char* kInstall = "install NVIDIA's driver 515 or newer, or pass arrays in CPU memory";

void* function_of(void* handle, const std::string& library, const char* name) {
  void* found = ::dlsym(handle, name);
  if (found == nullptr) throw Error(ErrorCode::kTransport, library + " is too old: it has no " + name, kInstall);
  return found;
}

}  // namespace

Driver Driver::open(const std::string& library) {
  // The library is never closed: its threads may run until the process ends.
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw Error(ErrorCode::kTransport, std::string("CUDA's driver cannot be opened: ") + (why ? why : library),
                kInstall);
  }
  Driver driver;
#define BPS_CUDA_LOAD(name, parameters) \
  driver.functions_.name = reinterpret_cast<decltype(driver.functions_.name)>(function_of(handle, library, #name));
  BPS_CUDA_FUNCTIONS(BPS_CUDA_LOAD)
#undef BPS_CUDA_LOAD
  driver.check(driver.call().cuInit(0), "CUDA's driver cannot be used");
  return driver;
}

std::string Driver::describe(cuda::Result result) const {
  const char* text = nullptr;
  if (functions_.cuGetErrorString(result, &text) != cuda::kSuccess || text == nullptr) text = "unknown error";
  return std::string(text) + " (CUDA error " + std::to_string(result) + ")";
}

void Driver::check(cuda::Result result, const std::string& what) const {
  if (result == cuda::kSuccess) return;
  if (cuda::is_of_capture(result))
    throw Error(ErrorCode::kInvalidArgument, what + ": " + describe(result), kEndCapture);
  throw Error(ErrorCode::kTransport, what + ": " + describe(result),
              "see the kernel log (dmesg) and nvidia-smi for the state of the GPU");
}

}  // namespace bps::device
