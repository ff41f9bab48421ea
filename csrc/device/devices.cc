// SPDX-License-Identifier: Apache-2.0
#include "device/devices.h"

#include <algorithm>
#include <array>
#include <cctype>
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

All& all_opened() {
  static auto& all = *new All;
  if (all.forks == fork_count()) return all;
  throw Error(ErrorCode::kTransport, "this process was forked after its parent had used a GPU, and cannot use it",
              "start processes that use a GPU by the method spawn of multiprocessing, or before the GPU is used");
}

// The caller holds the mutex.
Opened& open(All& all, const std::string& library) {
  auto& opened = all.by_library[library];
  if (!opened) opened = std::make_unique<Opened>(library);
  return *opened;
}

}  // namespace

Device* find_owner(const std::string& library, const void* memory) {
  All& all = all_opened();
  const std::lock_guard lock(all.mutex);
  Opened& opened = open(all, library);
  const auto ordinal = Device::owner_of(opened.driver, memory);
  if (!ordinal) return nullptr;
  auto& device = opened.devices[*ordinal];
  if (!device) device = std::make_unique<Device>(opened.driver, *ordinal);
  return device.get();
}

std::optional<cuda::Ordinal> choose_gpu(const GpuFacts& facts) {
  if (facts.wanted) {
    if (*facts.wanted < facts.count) return facts.wanted;
    throw Error(ErrorCode::kInvalidArgument,
                "there is no GPU " + std::to_string(*facts.wanted) + ": CUDA shows " + std::to_string(facts.count),
                "see CUDA_VISIBLE_DEVICES; `bps doctor` lists the GPUs");
  }
  if (facts.current) return facts.current;
  if (facts.count == 1) return 0;
  const auto by_rank = static_cast<cuda::Ordinal>(facts.local_rank.value_or(0));
  return facts.local_rank && by_rank < facts.count ? std::optional(by_rank) : std::nullopt;
}

std::string address_of_gpu(const std::string& library, std::optional<cuda::Ordinal> wanted,
                           std::optional<std::uint32_t> local_rank) {
  All& all = all_opened();
  const std::lock_guard lock(all.mutex);
  const Driver& driver = open(all, library).driver;
  GpuFacts facts{.wanted = wanted, .local_rank = local_rank};
  driver.check(driver.call().cuDeviceGetCount(&facts.count), "the GPUs cannot be counted");
  if (cuda::Ordinal current = 0; driver.call().cuCtxGetDevice(&current) == cuda::kSuccess) facts.current = current;
  const auto gpu = choose_gpu(facts);
  if (!gpu) return "";
  std::array<char, 32> address{};
  driver.check(driver.call().cuDeviceGetPCIBusId(address.data(), address.size(), *gpu), "a GPU has no PCI address");
  std::string found = address.data();
  std::ranges::transform(found, found.begin(), [](unsigned char one) { return static_cast<char>(std::tolower(one)); });
  return found;
}

}  // namespace bps::device
