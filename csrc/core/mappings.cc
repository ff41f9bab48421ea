// SPDX-License-Identifier: Apache-2.0
#include "core/mappings.h"

#include <fcntl.h>

#include <array>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/fd.h"

namespace bps {
namespace {

struct Mapping {
  std::uintptr_t first = 0;
  std::uintptr_t last = 0;
  bool is_private_anonymous = false;
};

// Reads a line such as "7f0000000000-7f0000021000 rw-p 00000000 00:00 0 name". The device and the number of a file are
// not zero.
bool parse(const char* line, Mapping& into) {
  char flags[5] = {};
  unsigned major = 0;
  unsigned minor = 0;
  std::uint64_t file = 0;
  if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*s %x:%x %" SCNu64, &into.first, &into.last, flags, &major,
                  &minor, &file) != 6) {
    return false;
  }
  into.is_private_anonymous = flags[3] == 'p' && major == 0 && minor == 0 && file == 0;
  return true;
}

}  // namespace

bool is_private_anonymous(std::span<const std::byte> bytes) {
  const Fd maps(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
  if (!maps) return false;
  auto next = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t end = next + bytes.size();
  std::array<char, 16384> buffer{};  // more than the longest line: a path has 4,096 bytes at most
  std::size_t filled = 0;
  for (;;) {
    const ssize_t n = ::read(maps.get(), buffer.data() + filled, buffer.size() - 1 - filled);
    if (n <= 0) return false;
    filled += static_cast<std::size_t>(n);
    buffer.at(filled) = '\0';
    char* line = buffer.data();
    for (char* stop = nullptr; (stop = std::strchr(line, '\n')) != nullptr; line = stop + 1) {
      *stop = '\0';
      Mapping mapping;
      if (!parse(line, mapping)) return false;
      if (mapping.last <= next) continue;
      if (mapping.first > next || !mapping.is_private_anonymous) return false;
      next = mapping.last;
      if (next >= end) return true;
    }
    filled -= static_cast<std::size_t>(line - buffer.data());
    std::memmove(buffer.data(), line, filled);
  }
}

}  // namespace bps
