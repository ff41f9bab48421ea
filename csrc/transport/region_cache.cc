// SPDX-License-Identifier: Apache-2.0
#include "transport/region_cache.h"

#include <iterator>

namespace bps::transport {

RegionPtr RegionCache::find(const Allocation& block) {
  if (const auto found = regions_.find(block.identity); found != regions_.end()) {
    ++hits_;
    by_use_.splice(by_use_.begin(), by_use_, found->second);
    return found->second->region;
  }
  ++misses_;
  by_use_.push_front({block.identity, transport_.register_memory(block.bytes)});
  regions_[block.identity] = by_use_.begin();
  RegionPtr region = by_use_.front().region;  // held, so that it stays
  evict();
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
  for (const Entry& entry : by_use_) sum += entry.region->bytes().size();
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
