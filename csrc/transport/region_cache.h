// Registrations by address range: page-rounded, shared, bounded.
//
// find() returns a region that covers the wanted bytes, registering the allocation around them when none does. The
// cache holds at most `limit` regions; the least recently used ones that nobody else holds go first. A region that
// somebody holds is never dropped. Threading: one thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>

#include "transport/transport.h"

namespace bps {

class RegionCache {
 public:
  RegionCache(Transport& transport, std::size_t limit) : transport_(transport), limit_(limit) {}

  // `allocation` must contain `wanted`. Throws what register_memory() throws.
  RegionPtr find(std::span<std::byte> wanted, std::span<std::byte> allocation);
  // The memory is about to be freed: forget every region that touches it.
  void forget(std::span<std::byte> bytes);

  std::size_t size() const { return regions_.size(); }
  std::uint64_t hits() const { return hits_; }
  std::uint64_t misses() const { return misses_; }

 private:
  struct Entry {
    RegionPtr region;
    std::uint64_t last_use;
  };
  void evict();

  Transport& transport_;
  const std::size_t limit_;
  std::map<std::uintptr_t, Entry> regions_;  // by first byte; regions of one cache may overlap
  std::uint64_t use_ = 0;
  std::uint64_t hits_ = 0;
  std::uint64_t misses_ = 0;
};

}  // namespace bps
