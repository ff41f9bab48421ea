// SPDX-License-Identifier: Apache-2.0
// Implements a bounded ring of postings in shared memory, for one producer process and one consumer process.
//
// The consumer says when it goes to sleep; the producer then knows that it has to ring the consumer's doorbell. Both
// use a full fence between their store and their load, so that at least one of them sees the other. The consumer trusts
// nothing in the ring: it checks indices, and copies postings out before it looks at them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/ring.h"
#include "transport/transport.h"

namespace bps::transport::shm {

enum class EntryKind : std::uint32_t { kWrite = 1, kPosting = 2 };

struct RingEntry {
  EntryKind kind;
  std::uint32_t immediate;
  RemoteSpan span;  // a posting: what is posted; a write: its length is the number of bytes that the producer has put
  std::uint32_t header_size;
  std::uint32_t reserved;
  std::array<std::byte, kMaxHeader> header;
};

struct PostingRing {
  static constexpr std::uint32_t kSize = 1024;  // 128 KiB: a few milliseconds of 4 KiB partitions

  struct alignas(2 * kCacheLine) Cell {
    RingEntry entry;
  };

  alignas(kCacheLine) std::atomic<std::uint32_t> tail;      // written by the producer
  alignas(kCacheLine) std::atomic<std::uint32_t> head;      // written by the consumer
  alignas(kCacheLine) std::atomic<std::uint32_t> sleeping;  // the consumer sets it, either clears it
  std::array<Cell, kSize> cells;
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "the ring is shared between processes");
static_assert(sizeof(RingEntry) <= 2 * kCacheLine);

class RingProducer {
 public:
  explicit RingProducer(PostingRing* ring) : ring_(ring) {}

  std::uint32_t room() {
    std::uint32_t used = tail_ - head_;
    if (used == PostingRing::kSize) {
      head_ = ring_->head.load(std::memory_order_acquire);
      used = tail_ - head_;
    }
    return used <= PostingRing::kSize ? PostingRing::kSize - used : 0;  // a lying consumer gets nothing more
  }
  // Needs room(). publish() makes what was added visible, and returns true when the consumer sleeps. It then sleeps
  // until somebody rings; see has_sleeper() and claim_sleeper().
  RingEntry& add() { return ring_->cells[tail_++ % PostingRing::kSize].entry; }
  bool publish() {
    ring_->tail.store(tail_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return has_sleeper();
  }
  bool has_sleeper() const { return ring_->sleeping.load(std::memory_order_relaxed) != 0; }
  bool is_drained() const { return ring_->head.load(std::memory_order_acquire) == tail_; }
  // Returns true for the one caller that has to ring.
  bool claim_sleeper() { return has_sleeper() && ring_->sleeping.exchange(0, std::memory_order_relaxed) != 0; }

 private:
  PostingRing* ring_;
  std::uint32_t tail_ = 0;
  std::uint32_t head_ = 0;
};

class RingConsumer {
 public:
  explicit RingConsumer(PostingRing* ring) : ring_(ring) {}

  bool empty() const { return ring_->tail.load(std::memory_order_acquire) == head_; }
  // Copies the next entry out, or returns false when there is none. A tail that jumps too far means a broken peer.
  bool take(RingEntry& out, bool& broken) {
    const std::uint32_t waiting = ring_->tail.load(std::memory_order_acquire) - head_;
    if (waiting == 0) return false;
    if (waiting > PostingRing::kSize) {
      broken = true;
      return false;
    }
    out = ring_->cells[head_ % PostingRing::kSize].entry;
    ring_->head.store(++head_, std::memory_order_release);
    return true;
  }
  // Announces that the consumer sleeps. Returns false when something arrived meanwhile.
  bool sleep() {
    ring_->sleeping.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return empty();
  }
  void awake() { ring_->sleeping.store(0, std::memory_order_relaxed); }

 private:
  PostingRing* ring_;
  std::uint32_t head_ = 0;
};

}  // namespace bps::transport::shm
