// SPDX-License-Identifier: Apache-2.0
#include "server/integer_mean.h"

#include <algorithm>
#include <cstring>

namespace bps::server {
namespace {

__extension__ using Int128 = __int128;

template <typename T>
struct WideOf;
template <>
struct WideOf<std::uint8_t> {
  using Type = std::int32_t;  // the sum of 2^16 ranks, the most there can be
};
template <>
struct WideOf<std::int8_t> {
  using Type = std::int32_t;
};
template <>
struct WideOf<std::int32_t> {
  using Type = std::int64_t;
};
template <>
struct WideOf<std::int64_t> {
  using Type = Int128;
};
template <typename T>
using Wide = typename WideOf<T>::Type;

template <typename W>
W floor_divide(W sum, std::int64_t divisor) {
  if constexpr (sizeof(W) > sizeof(std::int64_t)) {  // nearly every sum fits int64, whose division is an instruction
    const auto narrow = static_cast<std::int64_t>(sum);
    if (narrow == sum) return floor_divide(narrow, divisor);
  }
  return static_cast<W>(sum / divisor - (sum % divisor < 0 ? 1 : 0));
}

// A block of this size stays in the first-level cache with one block of a source.
constexpr std::size_t kAtOnce = 512;

// Calls use(sums, at, n) for one block after another.
template <typename T, typename Use>
void for_sums(std::span<const std::byte* const> sources, std::size_t count, Use use) {
  Wide<T> sums[kAtOnce];
  T block[kAtOnce];
  for (std::size_t at = 0; at < count; at += kAtOnce) {
    const std::size_t n = std::min(kAtOnce, count - at);
    std::fill_n(sums, n, 0);
    for (const std::byte* source : sources) {
      std::memcpy(block, source + at * sizeof(T), n * sizeof(T));  // sources need no alignment
      for (std::size_t i = 0; i < n; ++i) sums[i] += block[i];
    }
    use(sums, at, n);
  }
}

template <typename T>
void average(std::span<const std::byte* const> sources, std::span<std::byte* const> destinations, std::size_t count,
             std::uint32_t divisor) {
  for_sums<T>(sources, count, [&](const Wide<T>* sums, std::size_t at, std::size_t n) {
    T means[kAtOnce];
    for (std::size_t i = 0; i < n; ++i) means[i] = static_cast<T>(floor_divide<Wide<T>>(sums[i], divisor));
    for (std::byte* destination : destinations) std::memcpy(destination + at * sizeof(T), means, n * sizeof(T));
  });
}

template <typename T>
bool fits(std::span<const std::byte* const> sources, std::size_t count) {
  bool all = true;
  for_sums<T>(sources, count, [&](const Wide<T>* sums, std::size_t, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) all &= sums[i] == static_cast<T>(sums[i]);
  });
  return all;
}

}  // namespace

void average_integers(Dtype dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                      std::size_t count, std::uint32_t divisor) {
  switch (dtype) {
    case Dtype::kUint8: return average<std::uint8_t>(sources, destinations, count, divisor);
    case Dtype::kInt8: return average<std::int8_t>(sources, destinations, count, divisor);
    case Dtype::kInt32: return average<std::int32_t>(sources, destinations, count, divisor);
    case Dtype::kInt64: return average<std::int64_t>(sources, destinations, count, divisor);
    default: return;
  }
}

bool fits_integers(Dtype dtype, std::span<const std::byte* const> sources, std::size_t count) {
  switch (dtype) {
    case Dtype::kUint8: return fits<std::uint8_t>(sources, count);
    case Dtype::kInt8: return fits<std::int8_t>(sources, count);
    case Dtype::kInt32: return fits<std::int32_t>(sources, count);
    case Dtype::kInt64: return fits<std::int64_t>(sources, count);
    default: return true;
  }
}

}  // namespace bps::server
