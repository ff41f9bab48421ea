// SPDX-License-Identifier: Apache-2.0
#include "transport/region_cache.h"

#include <iterator>
#include <utility>

#include "transport/shm/shared_memory.h"

namespace bps::transport {

RegionPtr RegionCache::find(const Allocation& block) {
  if (const auto found = regions_.find(block.identity); found != regions_.end()) {
    by_use_.splice(by_use_.begin(), by_use_, found->second);
    return found->second->region;
  }
  by_use_.push_front({block.identity, make(block.bytes)});
  regions_[block.identity] = by_use_.begin();
  RegionPtr region = by_use_.front().region;  // holds the region, so that it stays
  evict();
  return region;
}

std::size_t RegionCache::drop_changed() {
  const std::uint32_t changes = MemoryWatch::changes();
  if (std::exchange(changes_, changes) == changes) [[likely]]
    return 0;
  std::size_t dropped = 0;
  for (auto it = by_use_.begin(); it != by_use_.end();) {
    Entry& entry = *it++;
    if (entry.region == nullptr || entry.region->is_current()) continue;
    ++dropped;
    if (entry.region->watch()->is_discarded()) {
      entry.region = nullptr;  // is staged from now on
    } else {
      forget(entry.identity);
    }
  }
  return dropped;
}

RegionPtr RegionCache::make(std::span<std::byte> bytes) {
  const CallersMemory rule = transport_.callers_memory();
  if (rule == CallersMemory::kInPlace || shm::SharedMemory::find(bytes)) return transport_.register_memory(bytes);
  if (rule == CallersMemory::kStaged) return nullptr;
  std::unique_ptr<MemoryWatch> watch = MemoryWatch::begin(bytes);
  if (!watch) return nullptr;
  RegionPtr region = transport_.register_memory(bytes);  // takes the present pages: an earlier change does no harm
  region->watch_by(std::move(watch));
  return region;
}

void RegionCache::forget(std::uint64_t identity) {
  const auto found = regions_.find(identity);
  if (found == regions_.end()) return;
  by_use_.erase(found->second);
  regions_.erase(found);
}

std::uint64_t RegionCache::bytes() const {
  std::uint64_t sum = 0;
  for (const Entry& entry : by_use_) sum += entry.region ? entry.region->bytes().size() : 0;
  return sum;
}

void RegionCache::evict() {
  for (auto it = by_use_.end(); it != by_use_.begin() && regions_.size() > limit_;) {
    if ((--it)->region.use_count() > 1) continue;
    regions_.erase(it->identity);
    it = by_use_.erase(it);
  }
}

}  // namespace bps::transport
