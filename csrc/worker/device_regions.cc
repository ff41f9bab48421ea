// SPDX-License-Identifier: Apache-2.0
#include "worker/device_regions.h"

#include <unistd.h>

#include <atomic>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace bps::worker {
namespace {

// Returns the whole pages around the bytes, which is what a dma-buf has.
std::span<std::byte> pages_around(std::span<std::byte> bytes) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uint64_t>(bytes.data());
  const std::uint64_t before = begin % page;
  const std::uint64_t size = (before + bytes.size() + page - 1) / page * page;
  return {bytes.data() - before, size};
}

// Says so once in each process: it concerns every operation.
void tell_why_staged(const device::Device& device, const std::string& why) {
  static std::atomic<bool> is_told{false};
  if (is_told.exchange(true)) return;
  log_warning("arrays of GPU " + std::to_string(device.ordinal()) +
              " are copied through memory of the host, as no RDMA device can use them directly: " + why);
}

}  // namespace

transport::RegionPtr DeviceRegions::find(const device::Device& device, std::span<std::byte> bytes) {
  if (!device.can_see_rdma_writes()) {
    tell_why_staged(device, "its kernels may not see what RDMA devices write");
    return nullptr;
  }
  if (const auto next = by_address_.upper_bound(bytes.data()); next != by_address_.begin()) {
    const Entry& known = std::prev(next)->second;
    if (known.holds(bytes) && known.device == &device && device.identity_of(bytes.data()) == known.block.identity) {
      return known.region;
    }
  }
  drop_freed();
  try {
    const device::Device::Block block = device.block_of(bytes.data());
    Entry made{&device, block, nullptr};
    if (!made.holds(bytes)) {  // an array over several allocations that lie side by side
      tell_why_staged(device, "an array does not lie in one allocation");
      return nullptr;
    }
    made.region = make(device, block);
    return by_address_.insert_or_assign(block.bytes.data(), std::move(made)).first->second.region;
  } catch (const Error& error) {
    tell_why_staged(device, error.what());
    return nullptr;
  }
}

transport::RegionPtr DeviceRegions::make(const device::Device& device, const device::Device::Block& block) {
  std::string why;
  const std::span<std::byte> pages = pages_around(block.bytes);
  try {
    const Fd exported = device.export_pages(pages);
    return transport_.register_foreign({pages, exported.get()});
  } catch (const Error& error) {
    why = error.what();
  }
  try {
    if (::access((modules_ + "/nvidia_peermem").c_str(), F_OK) == 0) return transport_.register_foreign({block.bytes});
    why += "; and nvidia_peermem is not loaded";
  } catch (const Error& error) {
    why += "; by nvidia_peermem: " + std::string(error.what());
  }
  tell_why_staged(device, why);
  return nullptr;
}

void DeviceRegions::drop_freed() {
  std::erase_if(by_address_, [](const auto& one) { return !one.second.is_current(); });
}

std::uint64_t DeviceRegions::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [address, entry] : by_address_) sum += entry.region ? entry.region->bytes().size() : 0;
  return sum;
}

}  // namespace bps::worker
