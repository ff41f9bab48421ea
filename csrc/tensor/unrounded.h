// SPDX-License-Identifier: Apache-2.0
// Defines how the exact sum of a host's ranks travels to the server unrounded.
//
// First come 16 bytes (the number of all bytes, as 64 bits, and zeros), then one float64 per element. Then follows an
// entry for each element whose sum one float64 does not hold, in the order of elements: its number and the number of
// its terms, as 32 bits each, and those terms in float64, whose sum it is. Its own float64 is NaN. A NaN without such
// an entry is a NaN. Where the highest bit of the number of terms is set, the first of them stands for 2^64 times as
// much: a sum of float64 may be beyond the largest of them by as much as there are ranks.
//
// Nothing here throws or allocates. A reader never leaves the bytes that it was given, whatever is in them, even if
// they change while it reads: a server has them from a peer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/dtype.h"

namespace bps::tensor {

inline constexpr std::size_t kUnroundedHeader = 16;

// Holds float64 numbers whose sum one float64 does not hold.
struct Terms {
  std::span<const double> terms;
  bool is_first_scaled = false;  // the first one stands for 2^64 times as much
};

// Returns how many float64 the sum of some numbers of this type can need. A float16 goes from 2^-24 to 2^16, with up to
// 8,192 terms. A sum of 65,536 float64 has 2,115 bits, 53 in each.
constexpr std::size_t most_terms(Dtype dtype) {
  return dtype == Dtype::kFloat16 ? 1 : dtype == Dtype::kFloat64 ? 64 : 6;
}

// Returns the most bytes that a host's sum of so many elements takes.
constexpr std::uint64_t most_unrounded_bytes(Dtype dtype, std::uint64_t elements) {
  const std::uint64_t terms = most_terms(dtype);
  return kUnroundedHeader + elements * (sizeof(double) + (terms == 1 ? 0 : 8 + terms * sizeof(double)));
}
// Returns the most elements whose sum always fits.
constexpr std::uint64_t most_unrounded_elements(Dtype dtype, std::uint64_t bytes) {
  const std::uint64_t each = most_unrounded_bytes(dtype, 1) - kUnroundedHeader;
  return bytes < kUnroundedHeader + each ? 0 : (bytes - kUnroundedHeader) / each;
}

// Returns the length of what lies at `from` (at least 16 bytes), or 0 when that cannot be a sum of so many elements.
inline std::uint64_t unrounded_bytes(const std::byte* from, std::uint64_t elements) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes < kUnroundedHeader + elements * sizeof(double) ? 0 : bytes;
}

inline constexpr std::uint32_t kFirstScaled = std::uint32_t{1} << 31;

class UnroundedWriter {
 public:
  // `into` has most_unrounded_bytes().
  UnroundedWriter(std::byte* into, std::uint64_t elements)
      : start_(into), end_(into + kUnroundedHeader + elements * sizeof(double)) {}

  // Returns where the float64 of the elements belong.
  std::byte* sums() const { return start_ + kUnroundedHeader; }
  void add(std::uint32_t element, std::span<const double> terms, bool is_first_scaled = false) {
    const auto count = static_cast<std::uint32_t>(terms.size());
    const std::uint32_t head[] = {element, is_first_scaled ? count | kFirstScaled : count};
    std::memcpy(end_, head, sizeof head);
    std::memcpy(end_ + sizeof head, terms.data(), terms.size_bytes());
    end_ += sizeof head + terms.size_bytes();
  }
  void finish() {
    const std::uint64_t head[] = {static_cast<std::uint64_t>(end_ - start_), 0};
    std::memcpy(start_, head, sizeof head);
  }

 private:
  std::byte* start_;
  std::byte* end_;
};

class UnroundedReader {
 public:
  UnroundedReader() = default;
  // `bytes` has at least the float64 of the elements.
  UnroundedReader(std::span<const std::byte> bytes, std::uint64_t elements)
      : sums_(bytes.data() + kUnroundedHeader), left_(bytes.subspan(kUnroundedHeader + elements * sizeof(double))) {}

  const std::byte* sums() const { return sums_; }
  // Returns the terms of an element. Elements must be asked for in order; the answer is valid until the next call.
  Terms terms(std::uint32_t element) {
    std::uint32_t head[2];
    while (left_.size() >= sizeof head) {
      std::memcpy(head, left_.data(), sizeof head);
      if (head[0] > element) break;
      const std::size_t claimed = head[1] & ~kFirstScaled;
      const std::size_t count = std::min({claimed, (left_.size() - sizeof head) / sizeof(double), kMost});
      std::memcpy(terms_, left_.data() + sizeof head, count * sizeof(double));
      left_ = left_.subspan(sizeof head + count * sizeof(double));
      if (head[0] == element) return {{terms_, count}, (head[1] & kFirstScaled) != 0};
    }
    std::memcpy(terms_, sums_ + element * sizeof(double), sizeof(double));
    return {{terms_, 1}, false};
  }

 private:
  static constexpr std::size_t kMost = 64;
  const std::byte* sums_ = nullptr;
  std::span<const std::byte> left_;
  double terms_[kMost];
};

}  // namespace bps::tensor
