#include "transport/region_cache.h"

#include <unistd.h>

namespace bps {
namespace {

std::uintptr_t begin_of(std::span<std::byte> bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes.data());
}
std::uintptr_t end_of(std::span<std::byte> bytes) {
  return begin_of(bytes) + bytes.size();
}

}  // namespace

RegionPtr RegionCache::find(std::span<std::byte> wanted, std::span<std::byte> allocation) {
  ++use_;
  // The candidate with the highest start at or below `wanted`; overlapping regions that start earlier are rare (an
  // allocation that grew) and are simply registered again under their own start.
  auto found = regions_.upper_bound(begin_of(wanted));
  if (found != regions_.begin()) {
    --found;
    if (end_of(found->second.region->bytes()) >= end_of(wanted)) {
      found->second.last_use = use_;
      ++hits_;
      return found->second.region;
    }
  }
  ++misses_;
  // Whole pages: a NIC pins pages anyway, and neighbours within the page then hit.
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = begin_of(allocation) / page * page;
  const std::uintptr_t end = (end_of(allocation) + page - 1) / page * page;
  RegionPtr region = transport_.register_memory({reinterpret_cast<std::byte*>(begin), end - begin});
  regions_[begin] = {region, use_};
  if (regions_.size() > limit_) evict();
  return region;
}

void RegionCache::forget(std::span<std::byte> bytes) {
  for (auto it = regions_.begin(); it != regions_.end();) {
    const auto region = it->second.region->bytes();
    const bool touches = begin_of(region) < end_of(bytes) && begin_of(bytes) < end_of(region);
    it = touches ? regions_.erase(it) : std::next(it);
  }
}

void RegionCache::evict() {
  auto oldest = regions_.end();
  for (auto it = regions_.begin(); it != regions_.end(); ++it) {
    if (it->second.region.use_count() > 1) continue;
    if (oldest == regions_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
  }
  if (oldest != regions_.end()) regions_.erase(oldest);
}

}  // namespace bps
