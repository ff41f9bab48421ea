// SPDX-License-Identifier: Apache-2.0
// Holds what every fuzz target checks, and starts mutations from valid messages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "core/codec.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace bps::fuzz {

inline void expect(bool holds) {
  if (!holds) __builtin_trap();
}

// Gives parts of an input from its front on, and zeroes behind its end.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  template <typename T>
  T take() {
    T value{};
    const auto from = take_bytes(sizeof value);
    std::memcpy(&value, from.data(), from.size());
    return value;
  }
  std::span<const std::byte> take_bytes(std::size_t most) {
    const auto taken = bytes_.first(std::min(most, bytes_.size()));
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }

 private:
  std::span<const std::byte> bytes_;
};

// Expects that a decoder accepts exactly what its encoder writes.
template <typename T>
void round_trip(std::span<const std::byte> bytes) {
  if (const auto message = codec::decode<T>(bytes)) expect(std::ranges::equal(codec::encode(*message), bytes));
  if constexpr (codec::Fixed<T>) {
    const bool valid = bytes.size() >= codec::kSize<T> && codec::decode<T>(bytes.first(codec::kSize<T>)).has_value();
    expect(codec::decode_front<T>(bytes).has_value() == valid);
  }
}

// Expects that a struct which the data path receives in place is accepted exactly when the decoder accepts its bytes.
template <codec::Plain T>
void same_in_place(std::span<const std::byte> bytes) {
  round_trip<T>(bytes);
  if (bytes.size() != sizeof(T)) return;
  T message{};
  std::ranges::copy(bytes, codec::writable_bytes_of(message).begin());
  expect(codec::accepts(message) == codec::decode<T>(bytes).has_value());
  expect(std::ranges::equal(codec::bytes_of(message), codec::encode(message)));
}

// Starts one in 64 mutations from a valid message, so that the checks behind the first ones are reached at once.
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
