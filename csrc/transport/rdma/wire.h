// SPDX-License-Identifier: Apache-2.0
// Makes types of the integers of RDMA: the ids of work requests, immediates, and what precedes each piece of a control
// message.
#pragma once

#include <arpa/inet.h>

#include <cstddef>
#include <cstdint>

#include "core/codec.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

// Names a work request in its completion. The upper byte says of what kind it is, the rest counts within the kind.
class WrId {
 public:
  enum class Kind : std::uint8_t { kSend = 1, kControlReceive = 2, kEmptyReceive = 3 };

  constexpr WrId(Kind kind, std::uint64_t number)
      : value_(std::uint64_t{static_cast<std::uint8_t>(kind)} << kBits | (number & kMask)) {}
  explicit constexpr WrId(std::uint64_t value) : value_(value) {}

  constexpr std::uint64_t value() const { return value_; }
  constexpr Kind kind() const { return static_cast<Kind>(value_ >> kBits); }
  constexpr std::uint64_t number() const { return value_ & kMask; }

 private:
  static constexpr int kBits = 56;  // enough for two thousand years of a million requests a second
  static constexpr std::uint64_t kMask = (std::uint64_t{1} << kBits) - 1;
  std::uint64_t value_;
};
static_assert(WrId(WrId::Kind::kSend, 77).number() == 77 && WrId(WrId::Kind::kSend, 77).kind() == WrId::Kind::kSend);

// Immediates travel in network order.
inline std::uint32_t to_wire(std::uint32_t immediate) {
  return htonl(immediate);
}
inline std::uint32_t from_wire(std::uint32_t immediate) {
  return ntohl(immediate);
}

// Precedes each piece of a control message. Pieces of one message follow each other on one queue pair, which keeps
// their order.
struct Fragment {
  std::uint32_t total;   // the number of bytes of the whole message
  std::uint32_t offset;  // that of this piece

  static constexpr void fields(auto& io, auto& m) {
    io(m.total, m.offset);
    io.require([&] { return m.total <= kMaxMessage && m.offset <= m.total; });
  }
};
static_assert(codec::Plain<Fragment> && sizeof(Fragment) == 8, "the control path sends the struct");

}  // namespace bps::transport::rdma
