// SPDX-License-Identifier: Apache-2.0
#include "device/devices.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/fork.h"

namespace bps::device {
namespace {

struct Opened {
  explicit Opened(const std::string& library) : driver(Driver::open(library)) {}
  const Driver driver;
  std::map<cuda::Ordinal, std::unique_ptr<Device>> devices;
};

// This is never destroyed: operations may outlive everything else of the process.
struct All {
  const std::uint32_t forks = fork_count();
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Opened>> by_library;
};

}  // namespace

Device* find_owner(const std::string& library, const void* memory) {
  static auto& all = *new All;
  if (all.forks != fork_count()) {
    throw Error(ErrorCode::kTransport, "this process was forked after its parent had used a GPU, and cannot use it",
                "start processes that use a GPU by the method spawn of multiprocessing, or before the GPU is used");
  }
  const std::lock_guard lock(all.mutex);
  auto& opened = all.by_library[library];
  if (!opened) opened = std::make_unique<Opened>(library);
  const auto ordinal = Device::owner_of(opened->driver, memory);
  if (!ordinal) return nullptr;
  auto& device = opened->devices[*ordinal];
  if (!device) device = std::make_unique<Device>(opened->driver, *ordinal);
  return device.get();
}

}  // namespace bps::device
