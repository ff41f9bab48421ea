// SPDX-License-Identifier: Apache-2.0
// Tells a peer of the regions of this process, by the socket between the two, and knows which of them it has told.
// Belongs to the thread of the loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "transport/memory.h"
#include "transport/shm/record.h"
#include "transport/shm/shared_memory.h"

namespace bps::transport::shm {

class ShmRegion final : public Region {
 public:
  ShmRegion(std::span<std::byte> bytes, std::uint64_t key, std::shared_ptr<SharedMemory> behind,
            std::function<void()> withdraw)
      : Region(bytes), piece(std::move(behind)), withdraw_(std::move(withdraw)) {
    key_ = key;
  }
  ~ShmRegion() override { withdraw_(); }
  const std::shared_ptr<SharedMemory> piece;  // null for plain memory

 private:
  std::function<void()> withdraw_;
};

class Announcements {
 public:
  // `peer` is the number of its process, for messages to people. The socket outlives the object.
  Announcements(int socket, int peer) : socket_(socket), peer_(peer) {}

  // Tells the peer of a region before an entry names it: its socket holds the record by the time it sees the entry.
  // Returns what send_record() returns: kAgain for now, or kPeerLost with errno.
  Status announce(const Region& region) { return known_.contains(region.key()) ? Status::kOk : send(region); }
  // Tells that a region is gone. No key comes twice, so kAgain only means that the peer keeps a mapping until the end.
  Status withdraw(std::uint64_t key);

 private:
  Status send(const Region& region);
  void note_shortage(int error);

  const int socket_;
  const int peer_;
  std::unordered_set<std::uint64_t> known_;
  bool said_short_ = false;
};

}  // namespace bps::transport::shm
