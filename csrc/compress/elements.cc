// SPDX-License-Identifier: Apache-2.0
#include "compress/elements.h"

#include <cstring>

#include "compress/half.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

// 16-bit floats are what one of two methods sends.
const Codec& half_codec(Dtype dtype) {
  static const Bfloat16Codec bfloat16;
  static const Float16Codec float16;
  if (dtype == Dtype::kBfloat16) return bfloat16;
  return float16;
}

}  // namespace

void widen(Dtype dtype, const std::byte* from, std::span<float> to, Into into) {
  if (dtype != Dtype::kFloat32) {
    // They accept all bytes of the right size.
    static_cast<void>(half_codec(dtype).decode({from, to.size() * size_of(dtype)}, to, into));
  } else if (into == Into::kReplace) {
    std::memcpy(to.data(), from, to.size_bytes());
  } else {
    choose(into, [&]<Into kInto>() {
      for (std::size_t i = 0; i < to.size(); ++i) put<kInto>(load<float>(from + i * sizeof(float)), to[i]);
    });
  }
}

void narrow(Dtype dtype, std::span<const float> from, std::byte* to) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(to, from.data(), from.size_bytes());
  } else {
    half_codec(dtype).encode(from, {to, from.size() * size_of(dtype)}, 0);
  }
}

}  // namespace bps::compress
