// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/outgoing_frames.h"

#include <algorithm>

namespace bps::transport::tcp {

void OutgoingFrames::add(const WriteOp& op) {
  Outgoing& out = frames_[(oldest_ + count_) % kMost];
  out.frame = {TcpFrame::kMagic, op.immediate, op.target.key, op.target.address, op.total()};
  copy_bytes(op.header, out.header.data());
  out.header_size = op.header.size();
  out.payload = op.length > 0 ? op.source->bytes().data() + op.source_offset : nullptr;
  out.length = op.length;
  out.token = op.token;
  out.sent = 0;
  ++count_;
}

std::size_t OutgoingFrames::next_pieces(Pieces& pieces) const {
  std::size_t count = 0;
  const auto add = [&](const void* data, std::uint64_t size, std::uint64_t& skip) {
    const std::uint64_t skipped = std::min(skip, size);
    skip -= skipped;
    if (size == skipped) return;
    pieces[count++] = {const_cast<char*>(static_cast<const char*>(data)) + skipped, size - skipped};
  };
  for (std::size_t i = 0; i < std::min(count_, kAtOnce); ++i) {
    const Outgoing& out = frames_[(oldest_ + i) % kMost];
    std::uint64_t skip = out.sent;
    add(&out.frame, sizeof out.frame, skip);
    add(out.header.data(), out.header_size, skip);
    add(out.payload, out.length, skip);
  }
  return count;
}

void OutgoingFrames::note_sent(std::uint64_t bytes, WrittenTokens& written) {
  while (bytes > 0) {
    Outgoing& out = frames_[oldest_];
    const std::uint64_t took = std::min(bytes, out.total() - out.sent);
    out.sent += took;
    bytes -= took;
    if (out.sent < out.total()) return;
    drop_oldest(written);
  }
}

void OutgoingFrames::give_up(WrittenTokens& written) {
  while (count_ > 0) drop_oldest(written);
}

void OutgoingFrames::drop_oldest(WrittenTokens& written) {
  written.add(frames_[oldest_].token);
  oldest_ = (oldest_ + 1) % kMost;
  --count_;
}

}  // namespace bps::transport::tcp
