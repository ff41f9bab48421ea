// SPDX-License-Identifier: Apache-2.0
// Defines the records that the two sides of a data endpoint send over its Unix socket, with descriptors attached.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/codec.h"

namespace bps::transport::shm {

struct ShmRecord {
  enum Kind : std::uint32_t {
    kSetup = 1,      // client: the rings and a probe; descriptors: the rings' file, the doorbell
    kReply = 2,      // server: a probe; descriptor: the doorbell
    kMapped = 3,     // a region in a file that the peer can map; descriptor: the file
    kPlain = 4,      // a region that the peer can copy from and to
    kWithdrawn = 5,  // a region that is gone
    kRefused = 6,  // a region that the receiver announced cannot be mapped; base: errno, size: the limit on open files
  };
  Kind kind;
  std::uint32_t reaches_plain;      // kReply: 1 when the sender can copy from the receiver's plain memory
  std::uint64_t key;                // kMapped, kPlain, kWithdrawn, kRefused: that of the region
  std::uint64_t base;               // kMapped: the offset in the file; kPlain, kSetup, kReply: a virtual address
  std::uint64_t size;               // the size of the region, or of the rings
  std::uint64_t file_size;          // kMapped: the size of the file
  std::array<std::byte, 16> probe;  // kSetup, kReply: what the receiver finds at `base` if it can read it

  static constexpr void fields(auto& io, auto& m) {
    io(m.kind, m.reaches_plain, m.key, m.base, m.size, m.file_size, m.probe);
    io.require([&] { return m.reaches_plain <= (m.kind == kReply ? 1U : 0U); });
    io.require(
        [&] { return m.kind == kMapped ? m.base <= m.file_size && m.size <= m.file_size - m.base : m.file_size == 0; });
    io.require([&] { return m.base + m.size >= m.base; });
  }
};
constexpr bool is_valid(ShmRecord::Kind kind) {
  return kind >= ShmRecord::kSetup && kind <= ShmRecord::kRefused;
}
static_assert(codec::kSize<ShmRecord> == 56, "part of the protocol");

}  // namespace bps::transport::shm
