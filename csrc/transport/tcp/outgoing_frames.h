// SPDX-License-Identifier: Apache-2.0
// Keeps the writes that a tcp connection has accepted and not sent wholly, the oldest first. Belongs to the loop.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/data_endpoint.h"
#include "transport/tcp/frame.h"

namespace bps::transport::tcp {

class OutgoingFrames {
 public:
  // A full queue of 4 MB partitions is drained by one round trip of acknowledgements. A caller that has more to send
  // keeps it, where something more urgent can still overtake it.
  static constexpr std::size_t kMost = 32;
  static constexpr std::size_t kAtOnce = 8;  // how many frames go out by one system call
  using Pieces = std::array<iovec, 3 * kAtOnce>;

  bool is_empty() const { return count_ == 0; }
  bool is_full() const { return count_ == kMost; }
  // Takes a write that fits. There must be room.
  void add(const WriteOp& op);
  // Sets what goes out next, and returns how many pieces these are.
  std::size_t next_pieces(Pieces& pieces) const;
  // Takes this many bytes as sent, and notes the writes whose source is read no more.
  void note_sent(std::uint64_t bytes, WrittenTokens& written);
  // Is called when nothing is sent any more, and so no source is read.
  void give_up(WrittenTokens& written);

 private:
  struct Outgoing {
    TcpFrame frame;
    std::array<std::byte, kMaxHeader> header;
    std::size_t header_size;
    const std::byte* payload;
    std::uint64_t length;
    std::uint64_t token;
    std::uint64_t sent;  // how many bytes of frame, header and payload together are out
    std::uint64_t total() const { return sizeof frame + header_size + length; }
  };
  void drop_oldest(WrittenTokens& written);

  std::array<Outgoing, kMost> frames_;
  std::size_t oldest_ = 0;
  std::size_t count_ = 0;
};

}  // namespace bps::transport::tcp
