// SPDX-License-Identifier: Apache-2.0
// Sizes the queues so that none of them can overflow, whatever the number of peers.
//
// - Send queue: an endpoint posts only while fewer than its window are unfinished, and the queue is as deep as the
//   window.
// - Send CQ: it holds one entry for each request of each send queue. A broken queue pair needs that many when it
//   flushes requests that asked for no completion. The queue grows with every queue pair, or the queue pair is refused.
// - Receive CQ: it holds one entry for each posted receive request: the shared ones, and each control endpoint's.
// - SRQ: never more is posted than its depth. When it runs empty the NIC makes the sender wait and try again, for ever
//   (rnr_retry 7). That is slower, and loses nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "transport/transport.h"

namespace bps::transport::rdma {

inline constexpr std::uint32_t kForeverRetry = 7;  // rnr_retry: 7 means without end

// A longer write is cut into pieces of this length. It is the smallest limit of a known device (rxe's), and the same on
// all devices. The receiver is told the length of the last piece, and so knows whether that fits the whole.
inline constexpr std::uint64_t kLongestPiece = 8 << 20;
// This many requests may be in flight per data queue pair. The largest partition (1 GiB) and its header must fit in. A
// worker loop has 136 landing slots per server loop (ServerLoop), so a larger window would stand empty.
inline constexpr std::uint32_t kDataWindow = 144;
inline constexpr std::uint64_t kLargestWrite = (std::uint64_t{1} << 30) + kMaxHeader;
static_assert(kDataWindow * kLongestPiece >= kLargestWrite);
// A completion is asked for at the end of each batch, and after this many requests of a long one, so that the window
// reopens before it is used up.
inline constexpr std::uint32_t kSignalEvery = 16;
static_assert(kSignalEvery * 4 <= kDataWindow);

// The control plane has small buffers, registered once. A credit message per landing slot is the most that the peer can
// send in a turn. When the buffers are full the NIC makes the peer wait.
inline constexpr std::uint32_t kControlSends = 32;
inline constexpr std::uint32_t kControlReceives = 64;
inline constexpr std::uint32_t kControlBuffer = 4096;
static_assert((kControlSends + kControlReceives) * kControlBuffer + kDataWindow * kMaxHeader < 1 << 20,
              "at most 1 MB registered per peer");

inline constexpr std::uint32_t kSharedReceives = 4096;  // empty receive requests per loop: 64 bytes each
inline constexpr std::uint32_t kRepostBatch = 64;
inline constexpr std::uint32_t kPollBatch = 32;

// Counts what one completion queue must hold. It grows in doublings up to what the device allows.
class QueueBudget {
 public:
  // `reserved` entries are taken for good. `size` is that of the queue at first.
  QueueBudget(std::uint32_t reserved, std::uint32_t size, std::uint32_t limit)
      : reserved_(reserved), size_(std::min(std::max(reserved, size), limit)), limit_(limit) {}

  // Makes room for `entries` more. Returns the size that the queue must have now; nothing when the device has none.
  std::optional<std::uint32_t> reserve(std::uint32_t entries) {
    const std::uint64_t wanted = std::uint64_t{reserved_} + entries;
    if (wanted > limit_) return std::nullopt;
    reserved_ = static_cast<std::uint32_t>(wanted);
    if (reserved_ > size_) {
      size_ = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(std::uint64_t{size_} * 2, reserved_, limit_));
    }
    return size_;
  }
  void release(std::uint32_t entries) { reserved_ -= std::min(reserved_, entries); }
  std::uint32_t reserved() const { return reserved_; }
  std::uint32_t size() const { return size_; }
  std::uint32_t limit() const { return limit_; }

 private:
  std::uint32_t reserved_;
  std::uint32_t size_;
  std::uint32_t limit_;
};

// Returns into how many requests a write is cut.
constexpr std::uint64_t pieces_of(std::uint64_t bytes) {
  return bytes == 0 ? 1 : (bytes + kLongestPiece - 1) / kLongestPiece;
}

}  // namespace bps::transport::rdma
