// SPDX-License-Identifier: Apache-2.0
#include "server/slot_pool.h"

#include <sys/mman.h>

#include <algorithm>

#include "core/limits.h"
#include "tensor/control_messages.h"

namespace bps::server {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kSlab = 1 << 20;  // small slots come by the slab, large ones one by one

// Sizes of slots follow the partitions of different tensors. They are rounded up to a page (small) or an eighth of the
// next power of two (large), which keeps the number of size classes small.
std::uint64_t capacity_for(std::uint64_t payload) {
  const std::uint64_t wanted = payload + transport::kMaxHeader;
  std::uint64_t step = kPage;
  while (step * 16 <= wanted) step *= 2;
  return (wanted + step - 1) / step * step;
}

}  // namespace

SlotPool::SizeClass* SlotPool::find(std::uint64_t capacity) {
  const auto found = std::ranges::find(classes_, capacity, &SizeClass::capacity);
  return found == classes_.end() ? nullptr : &*found;
}

void SlotPool::reserve(std::uint64_t payload, std::size_t count) {
  const std::uint64_t capacity = capacity_for(payload);
  SizeClass* size_class = find(capacity);
  if (size_class == nullptr) size_class = &classes_.emplace_back(SizeClass{.capacity = capacity, .free = {}});
  if (size_class->free.size() >= count) return;
  check_memory((count - size_class->free.size()) * capacity, "cannot reserve landing slots");
  while (size_class->free.size() < count) grow(*size_class);
}

Slot* SlotPool::take(std::uint64_t payload) {
  SizeClass* size_class = find(capacity_for(payload));
  if (size_class == nullptr || size_class->free.empty()) return nullptr;
  Slot* slot = size_class->free.back();
  size_class->free.pop_back();
  return slot;
}

void SlotPool::give_back(Slot* slot) {
  slot->window = nullptr;
  slot->granted = false;
  slot->overflow = false;
  slot->filled_by = nullptr;
  find(slot->capacity)->free.push_back(slot);
}

void SlotPool::reclaim(const SlotWindow& window) {
  for (Slot& slot : slots_) {
    if (slot.window == &window && slot.granted) give_back(&slot);
  }
}

void SlotPool::stop_fill(const transport::DataEndpoint& closed) {
  for (Slot& slot : slots_) {
    if (slot.filled_by == &closed) slot.filled_by = nullptr;
  }
}

void SlotPool::grow(SizeClass& size_class) {
  const transport::Reactor::SetUp set_up(reactor_);
  const std::uint64_t count = std::max<std::uint64_t>(1, kSlab / size_class.capacity);
  if (slots_.size() + count > tensor::SlotNumber::kEnd) {
    throw Error(ErrorCode::kInternal,
                "a server loop has no more than " + std::to_string(slots_.size()) + " landing slots",
                "use more servers, or more loops on each (BPS_SERVER_ENGINE_THREAD)");
  }
  const std::uint64_t size = count * size_class.capacity;
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw_errno("cannot reserve " + std::to_string(size) + " bytes for landing slots",
                "lower BPS_SERVER_WINDOW or BPS_PARTITION_BYTES, or give the server more memory");
  }
  Slab made;
  made.memory = {static_cast<std::byte*>(memory), [size](std::byte* first) { ::munmap(first, size); }};
  for (transport::Transport* transport : transports_) {
    made.regions.push_back(transport->register_memory({made.memory.get(), size}));
  }
  Slab& slab = slabs_.emplace_back(std::move(made));
  bytes_ += size;
  size_class.slots += count;
  if (size_class.free.capacity() < size_class.slots) size_class.free.reserve(size_class.slots * 2);
  for (std::uint64_t i = 0; i < count; ++i) {
    Slot& slot = slots_.emplace_back();
    slot.number = static_cast<std::uint32_t>(slots_.size() - 1);
    slot.offset = i * size_class.capacity;
    slot.data = slab.memory.get() + slot.offset;
    slot.capacity = size_class.capacity;
    slot.regions = &slab.regions;
    size_class.free.push_back(&slot);
  }
}

bool SlotPool::serves(const transport::Transport& transport) const {
  return std::ranges::find(transports_, &transport) != transports_.end();
}

const transport::Region& SlotPool::region(const Slot& slot, const transport::Transport& transport) const {
  const auto found = std::find(transports_.begin(), transports_.end(), &transport);
  return *(*slot.regions)[static_cast<std::size_t>(found - transports_.begin())];
}

}  // namespace bps::server
