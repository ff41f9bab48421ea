// SPDX-License-Identifier: Apache-2.0
// Knows the regions of its memory that a peer has announced. Belongs to the thread of the loop.
//
// Announcements are also taken in the middle of a sum, which may use regions that it has found before. So a region that
// is withdrawn stays mapped until drop_retired().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/memory.h"
#include "transport/shm/shared_memory.h"

namespace bps::transport::shm {

class PeerMemory {
 public:
  struct Region {
    std::shared_ptr<SharedMemory> piece;  // null for plain memory
    std::byte* mapped = nullptr;
    std::uint64_t base = 0;
    std::uint64_t size = 0;

    bool has(const RemoteSpan& span) const { return span.address <= size && span.length <= size - span.address; }
  };

  bool is_full() const { return regions_.size() >= kMost; }
  void add(std::uint64_t key, Region region) {
    retire(key);
    regions_[key] = std::move(region);
  }
  void retire(std::uint64_t key) {
    const auto found = regions_.find(key);
    if (found == regions_.end()) return;
    if (found->second.piece) retired_.push_back(std::move(found->second));
    regions_.erase(found);
  }
  void drop_retired() { retired_.clear(); }
  // Returns null when the peer has not announced the region.
  const Region* find(std::uint64_t key) const {
    const auto found = regions_.find(key);
    return found == regions_.end() ? nullptr : &found->second;
  }

 private:
  static constexpr std::size_t kMost = 1 << 20;  // more than the process of a peer may map

  std::unordered_map<std::uint64_t, Region> regions_;
  std::vector<Region> retired_;
};

}  // namespace bps::transport::shm
