// SPDX-License-Identifier: Apache-2.0
// Keeps registrations by block of memory. They are shared, bounded, and never taken for those of another block.
//
// A device that was told of a block goes on using its pages when the block has been freed and its addresses belong to
// another one. So blocks are known by an identity that is never used twice, not by their addresses. The device also
// goes on using the pages when the block's owner has given them back, and got others in their place. So a device gets
// memory that we have allocated, and memory that is watched (core/memory_watch.h), which is registered anew when its
// pages have changed. All other memory is staged, which the cache notes, and so is a block from which pages were
// discarded once: the end of that may be still to come.
//
// The cache holds at most `limit` regions. Those not used for longest go first, but none that somebody holds. It
// belongs to one thread.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>

#include "transport/transport.h"

namespace bps::transport {

struct Allocation {
  std::span<std::byte> bytes;
  std::uint64_t identity = 0;
};

class RegionCache {
 public:
  RegionCache(Transport& transport, std::size_t limit)
      : transport_(transport), limit_(limit), watches_(transport.callers_memory() == CallersMemory::kWatched) {}

  // Returns the region of the whole block, or null when it has to be staged. Where the cache watches(), drop_changed()
  // must be called before. Throws what register_memory() throws.
  RegionPtr find(const Allocation& block);
  bool watches() const { return watches_; }
  // Lets go of all blocks of which pages have been given back, whether they are used again or not: as long as a device
  // knows these pages, nobody else gets them. Returns how many blocks these are.
  std::size_t drop_changed();
  // Is called when the block is gone.
  void forget(std::uint64_t identity);

  // Returns the sum over all regions. Walks through them.
  std::uint64_t bytes() const;

 private:
  struct Entry {
    std::uint64_t identity;
    RegionPtr region;
  };
  RegionPtr make(std::span<std::byte> bytes);
  void evict();

  Transport& transport_;
  const std::size_t limit_;
  const bool watches_;
  std::uint32_t changes_ = 0;  // MemoryWatch::changes() when drop_changed() looked last
  std::list<Entry> by_use_;    // the one used last comes first
  std::unordered_map<std::uint64_t, std::list<Entry>::iterator> regions_;
};

}  // namespace bps::transport
