// SPDX-License-Identifier: Apache-2.0
// Holds a number that counts below a limit. Messages carry one wherever their receiver keeps a table by that number. A
// number beyond the limit does not decode, so the holder of one may use it as an index or as a size.
#pragma once

namespace bps {

template <typename T, T kLimit>
class Below {
 public:
  static constexpr T kEnd = kLimit;

  constexpr Below() = default;
  // Takes a number of this process. It must be below the limit, since the peer refuses one that is not.
  explicit constexpr Below(T value) : value_(value) {}
  constexpr operator T() const { return value_; }

  static constexpr void fields(auto& io, auto& m) {
    io(m.value_);
    io.require([&] { return m.value_ < kLimit; });
  }
  bool operator==(const Below&) const = default;

 private:
  T value_ = 0;
};

}  // namespace bps
