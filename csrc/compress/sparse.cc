// SPDX-License-Identifier: Apache-2.0
#include "compress/sparse.h"

#include <algorithm>
#include <array>
#include <bit>

#include "compress/float_bits.h"
#include "compress/random.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

struct Threshold {
  std::uint32_t magnitude;  // the smallest one that is sent
  std::size_t ties;         // how many elements of just that magnitude are
};

// Digit by digit, as radix sort does, of which only one bucket matters each time.
Threshold find_threshold(std::span<const float> from, std::size_t sent) {
  constexpr unsigned kShifts[] = {20, 10, 0};
  constexpr std::uint32_t kDigits = 1 << 11;
  std::uint32_t prefix = 0;
  unsigned known_from = 31;  // bits from here on are those of `prefix`
  std::size_t left = sent;
  for (const unsigned shift : kShifts) {
    std::array<std::uint32_t, kDigits> counts{};
    const std::uint32_t mask = (1U << (known_from - shift)) - 1;
    for (const float value : from) {
      const std::uint32_t bits = magnitude(value);
      if (known_from == 31 || bits >> known_from == prefix) ++counts[(bits >> shift) & mask];
    }
    std::uint32_t digit = mask;
    while (counts[digit] < left) left -= counts[digit--];
    prefix = prefix << (known_from - shift) | digit;
    known_from = shift;
  }
  return {prefix, left};
}

template <Into kInto>
void clear(std::span<float> to) {
  if constexpr (kInto == Into::kReplace) std::fill(to.begin(), to.end(), 0.0F);
}

}  // namespace

std::size_t SparseCodec::sent(std::size_t elements) const {
  if (elements == 0) return 0;
  const double wanted = k_ < 1 ? k_ * static_cast<double>(elements) : k_;
  if (wanted >= static_cast<double>(elements)) return elements;
  return std::max<std::size_t>(1, static_cast<std::size_t>(wanted));
}

void TopkCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  const std::size_t count = sent(from.size());
  if (count == 0) return;
  auto [threshold, ties] = find_threshold(from, count);
  std::byte* index = to.data();
  std::byte* value = to.data() + count * 4;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::uint32_t bits = magnitude(from[i]);
    if (bits < threshold || (bits == threshold && ties == 0)) continue;
    if (bits == threshold) --ties;
    store(static_cast<std::uint32_t>(i), index);
    store(from[i], value);
    index += 4;
    value += 4;
  }
}

Decoded TopkCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  const std::size_t count = sent(to.size());
  std::uint64_t first_free = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto index = load<std::uint32_t>(from.data() + 4 * i);
    if (index < first_free || index >= to.size()) return Decoded::kMalformed;
    first_free = std::uint64_t{index} + 1;
  }
  choose(into, [&]<Into kInto>() {
    clear<kInto>(to);
    const std::byte* values = from.data() + 4 * count;
    for (std::size_t i = 0; i < count; ++i) {
      const auto index = load<std::uint32_t>(from.data() + 4 * i);
      // Again: a peer that may write to these bytes may have changed them since.
      if (index < to.size()) put<kInto>(load<float>(values + 4 * i), to[index]);
    }
  });
  return Decoded::kOk;
}

namespace {

// Calls visit(j, index) for each element that is sent, in order. 128 bits: neither product may overflow.
template <typename Visit>
void visit_drawn(std::uint64_t seed, std::size_t elements, std::size_t sent, Visit visit) {
  __extension__ using Wide = unsigned __int128;
  std::size_t begin = 0;
  for (std::size_t j = 0; j < sent; ++j) {
    const auto end = static_cast<std::size_t>(static_cast<Wide>(j + 1) * elements / sent);
    const std::uint64_t draw = random_bits(seed, j) >> 32;
    visit(j, begin + static_cast<std::size_t>((static_cast<Wide>(draw) * (end - begin)) >> 32));
    begin = end;
  }
}

}  // namespace

void RandomkCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const {
  if (from.empty()) return;
  store(seed, to.data());
  std::byte* values = to.data() + sizeof seed;
  visit_drawn(seed, from.size(), sent(from.size()),
              [&](std::size_t j, std::size_t index) { store(from[index], values + 4 * j); });
  // Whoever looks for overflows has to see that there is one, also where it was not drawn.
  if (!all_finite(from)) store(std::bit_cast<float>(kNan), values);
}

Decoded RandomkCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  if (to.empty()) return Decoded::kOk;
  const auto seed = load<std::uint64_t>(from.data());
  const std::byte* values = from.data() + sizeof seed;
  choose(into, [&]<Into kInto>() {
    clear<kInto>(to);
    visit_drawn(seed, to.size(), sent(to.size()),
                [&](std::size_t j, std::size_t index) { put<kInto>(load<float>(values + 4 * j), to[index]); });
  });
  return Decoded::kOk;
}

}  // namespace bps::compress
