// SPDX-License-Identifier: Apache-2.0
// The regions of this process, and which of them a peer has been told of, by the socket between the two. Threading: the
// loop's.
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
  const std::shared_ptr<SharedMemory> piece;  // null: plain memory

 private:
  std::function<void()> withdraw_;
};

class Announcements {
 public:
  // `peer`: its process, for people. The socket outlives the object.
  Announcements(int socket, int peer) : socket_(socket), peer_(peer) {}

  // The peer must know a region before an entry names it: its socket holds the record by the time it sees the entry. As
  // send_record(): kAgain for now, or kPeerLost with errno.
  Status announce(const Region& region) { return known_.contains(region.key()) ? Status::kOk : send(region); }
  // The same; keys are never used twice. kAgain only means that the peer keeps a mapping until it closes.
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
