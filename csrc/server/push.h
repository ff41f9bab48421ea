// SPDX-License-Identifier: Apache-2.0
// Describes a push that has come in, and how long its payload is. Belongs to the server loop's thread.
#pragma once

#include <cstdint>

#include "server/compressed_sum.h"
#include "server/round.h"

namespace bps::server {

struct Push {
  WorkerSession& session;
  transport::DataEndpoint& from;
  tensor::PushHeader header;
  Slot* slot;                                          // where the push lies; nullptr: only a header was posted
  transport::RemoteSpan span;                          // of the payload in the worker's memory, if there is no slot
  std::uint64_t arrived;                               // bytes of the payload, as the transport knows
  std::uint32_t contributor = 0;                       // its index in the round, once that is known
  const compress::Compression* compression = nullptr;  // of the payload; nullptr: there is none
  std::uint64_t payload = 0;                           // bytes of the payload, as the header and its first bytes say

  bool pushes() const { return (header.flags & tensor::kIsPush) != 0; }
  bool pulls() const { return (header.flags & tensor::kIsPull) != 0; }
  bool has_payload() const { return (header.flags & tensor::kHasPayload) != 0; }
  bool is_for_host() const { return (header.flags & tensor::kForHost) != 0; }
};

// Finds `payload`, and `compression`, before the header is trusted. `payload` is 0 where its first bytes make no sense.
void measure_encoded(Push& push, CompressedSummer& compressed, std::uint64_t largest_partition);
inline void measure(Push& push, CompressedSummer& compressed, std::uint64_t largest_partition) {
  push.payload = push.header.length;
  const bool is_plain = (push.header.flags & (tensor::kCompressed | tensor::kUnrounded)) == 0;
  if (!is_plain) measure_encoded(push, compressed, largest_partition);
}

// Returns true where a payload that came in pieces has its due length. A transport that has cut a write tells the
// length of the last piece.
bool is_whole_in_pieces(const Push& push, std::uint64_t due);
inline bool is_whole(const Push& push) {
  const std::uint64_t due = push.has_payload() ? push.payload : 0;
  return push.arrived == due || is_whole_in_pieces(push, due);
}

// Notes in the round what the push has brought, and what its sender waits for.
void record(Round& round, Arrival& arrival, const Push& push);

}  // namespace bps::server
