// SPDX-License-Identifier: Apache-2.0
// A frame travels in front of each write on a data endpoint of tcp.
#pragma once

#include <cstdint>

#include "core/codec.h"

namespace bps::transport::tcp {

struct TcpFrame {
  static constexpr std::uint32_t kMagic = 0x53504231;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;
  std::uint32_t magic;
  std::uint32_t immediate;
  std::uint64_t key;  // that of the receiver's region; `address` is the offset there
  std::uint64_t address;
  std::uint64_t length;  // that of header and payload together

  static constexpr void fields(auto& io, auto& m) {
    io(m.magic, m.immediate, m.key, m.address, m.length);
    io.require([&] { return m.magic == kMagic && m.length <= kMostBytes; });
  }
};
static_assert(codec::Plain<TcpFrame> && sizeof(TcpFrame) == 32, "the data path sends and receives the struct");

}  // namespace bps::transport::tcp
