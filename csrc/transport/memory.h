// SPDX-License-Identifier: Apache-2.0
// Memory that takes part in transfers: regions of this process, and spans of a peer's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace bps::transport {

// Memory of a peer, in the peer's own notation: the key it told us, and an address that counts from the region's
// origin.
struct RemoteSpan {
  std::uint64_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
};

// Memory of this process that a transport has registered. It stays registered for as long as the object lives.
class Region {
 public:
  explicit Region(std::span<std::byte> bytes) : bytes_(bytes) {}
  virtual ~Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  // The part [offset, offset + length) as the peer has to name it.
  RemoteSpan remote(std::uint64_t offset, std::uint64_t length) const { return {key_, origin_ + offset, length}; }
  std::uint64_t key() const { return key_; }

 protected:
  std::uint64_t key_ = 0;
  std::uint64_t origin_ = 0;  // a NIC counts from the virtual address, the others from zero

 private:
  std::span<std::byte> bytes_;
};

using RegionPtr = std::shared_ptr<Region>;

}  // namespace bps::transport
