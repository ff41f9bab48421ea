#include "server/slot_pool.h"

#include <sys/mman.h>

#include <algorithm>

namespace bps::server {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kSlab = 1 << 20;  // small slots come by the slab, large ones one by one

}  // namespace

Slot* SlotPool::take(std::uint64_t payload) {
  // Sizes differ by the partitions of different tensors; rounding to a page (small) or an eighth of the next power of
  // two (large) keeps the classes few.
  const std::uint64_t wanted = payload + transport::kMaxHeader;
  std::uint64_t step = kPage;
  while (step * 16 <= wanted) step *= 2;
  const std::uint64_t capacity = (wanted + step - 1) / step * step;
  auto found = std::find_if(classes_.begin(), classes_.end(), [&](const Class& c) { return c.capacity == capacity; });
  if (found == classes_.end()) found = classes_.insert(classes_.end(), Class{capacity, {}});
  if (found->free.empty()) grow(*found);
  Slot* slot = found->free.back();
  found->free.pop_back();
  return slot;
}

void SlotPool::give_back(Slot* slot) {
  slot->landing_for = nullptr;
  slot->overflow = false;
  const auto found =
      std::find_if(classes_.begin(), classes_.end(), [&](const Class& c) { return c.capacity == slot->capacity; });
  found->free.push_back(slot);
}

void SlotPool::grow(Class& size_class) {
  const std::uint64_t count = std::max<std::uint64_t>(1, kSlab / size_class.capacity);
  const std::uint64_t size = count * size_class.capacity;
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw_errno("cannot reserve " + std::to_string(size) + " bytes for landing slots",
                "lower BPS_SERVER_WINDOW or BYTEPS_PARTITION_BYTES, or give the server more memory");
  }
  Slab made;
  made.memory = {static_cast<std::byte*>(memory), [size](std::byte* first) { ::munmap(first, size); }};
  for (transport::Transport* transport : transports_) {
    made.regions.push_back(transport->register_memory({made.memory.get(), size}));
  }
  Slab& slab = slabs_.emplace_back(std::move(made));
  bytes_ += size;
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

const transport::Region& SlotPool::region(const Slot& slot, const transport::Transport& transport) const {
  const auto found = std::find(transports_.begin(), transports_.end(), &transport);
  return *(*slot.regions)[static_cast<std::size_t>(found - transports_.begin())];
}

}  // namespace bps::server
