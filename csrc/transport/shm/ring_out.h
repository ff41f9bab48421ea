// SPDX-License-Identifier: Apache-2.0
// Writes to the ring of a peer, and rings the doorbell that wakes the peer when it sleeps. Belongs to the thread of the
// loop.
//
// A peer that sleeps is not woken at once. Between two calls of a caller that makes progress itself (progress.h) it
// sleeps for a few microseconds only, and waking its thread costs both processes more than that. It is woken when this
// process has nothing left to do, or a moment later.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#include "core/clock.h"
#include "core/fd.h"
#include "transport/shm/posting_ring.h"

namespace bps::transport::shm {

class RingOut {
 public:
  RingOut(PostingRing* ring, Fd doorbell) : ring_(ring), doorbell_(std::move(doorbell)) {}

  std::uint32_t room() { return ring_.room(); }
  RingEntry& add() { return ring_.add(); }  // needs room()
  bool is_drained() const { return ring_.is_drained(); }
  void publish() {
    if (!ring_.publish() || is_due_) return;
    is_due_ = true;
    due_since_ = Clock::now();
  }
  // Returns true when the peer slept as something was published.
  bool is_due() const { return is_due_; }
  void ring_if_late() {
    if (!ring_.has_sleeper() || ring_.is_drained()) {
      is_due_ = false;
    } else if (Clock::now() - due_since_ >= kWakeDelay) {
      ring();
    }
  }
  void ring() {
    is_due_ = false;
    if (!ring_.claim_sleeper()) return;
    bps::ring(doorbell_.get());
  }

 private:
  static constexpr auto kWakeDelay = std::chrono::microseconds(15);

  RingProducer ring_;
  Fd doorbell_;
  bool is_due_ = false;
  Clock::time_point due_since_{};
};

}  // namespace bps::transport::shm
