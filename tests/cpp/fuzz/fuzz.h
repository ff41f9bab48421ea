// What every fuzz target checks, and how mutations start from valid messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/codec.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace bps::fuzz {

inline void expect(bool holds) {
  if (!holds) __builtin_trap();
}

// A decoder accepts exactly what its encoder writes.
template <typename T>
void round_trip(std::span<const std::byte> bytes) {
  if (const auto message = codec::decode<T>(bytes)) expect(std::ranges::equal(codec::encode(*message), bytes));
  if constexpr (codec::Fixed<T>) {
    const bool valid = bytes.size() >= codec::kSize<T> && codec::decode<T>(bytes.first(codec::kSize<T>)).has_value();
    expect(codec::decode_front<T>(bytes).has_value() == valid);
  }
}

// A struct that the data path receives in place is accepted exactly when the decoder accepts its bytes.
template <codec::Plain T>
void same_in_place(std::span<const std::byte> bytes) {
  round_trip<T>(bytes);
  if (bytes.size() != sizeof(T)) return;
  T message{};
  std::ranges::copy(bytes, codec::writable_bytes_of(message).begin());
  expect(codec::accepts(message) == codec::decode<T>(bytes).has_value());
  expect(std::ranges::equal(codec::bytes_of(message), codec::encode(message)));
}

// One in 64 mutations starts from a valid message, so that the checks behind the first ones are reached at once.
inline std::size_t mutate_from(const std::vector<Bytes>& samples, std::uint8_t* data, std::size_t size,
                               std::size_t most, unsigned seed) {
  if (seed % 64 == 0) {
    const auto& bytes = samples[seed / 64 % samples.size()];
    if (bytes.size() <= most) {
      size = bytes.size();
      copy_bytes(bytes, data);
    }
  }
  return LLVMFuzzerMutate(data, size, most);
}

template <typename... Array>
std::vector<Bytes> as_samples(const Array&... arrays) {
  return {Bytes(arrays.begin(), arrays.end())...};
}

}  // namespace bps::fuzz
