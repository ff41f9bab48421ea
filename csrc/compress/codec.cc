// SPDX-License-Identifier: Apache-2.0
#include "compress/codec.h"

#include <array>

#include "compress/half.h"
#include "compress/int8_blocks.h"

namespace bps::compress {
namespace {

const Bfloat16Codec kBfloat16;
const Float16Codec kFloat16;
const Int8BlocksCodec kInt8Blocks;
constexpr std::array<const Codec*, 3> kCodecs{&kBfloat16, &kFloat16, &kInt8Blocks};

}  // namespace

std::span<const Codec* const> codecs() {
  return kCodecs;
}

const Codec* find_codec(std::string_view name) {
  for (const Codec* codec : kCodecs) {
    if (codec->name() == name) return codec;
  }
  return nullptr;
}

}  // namespace bps::compress
