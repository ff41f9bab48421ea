// SPDX-License-Identifier: Apache-2.0
// How fast the codecs are on one core beside memcpy: one JSON line per codec and partition size.
//
// All rates are GB of float32 elements per second (1e9 bytes), whatever their encoded size: encode_gbps, decode_gbps
// (replacing), add_gbps (decoding into a sum), and memcpy_gbps, a copy of the same elements. They take turns and the
// best of many rounds counts, because a shared machine only ever makes things slower. bytes_per_element: on the wire.
//
//   codec_bench [COMPRESSION...]      e.g. codec_bench int8 topk:k=0.01
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "compress/compression.h"
#include "passes.h"

namespace {

using bps::compress::Codec;
using bps::compress::Decoded;
using bps::compress::Into;

constexpr std::size_t kSizes[] = {std::size_t{64} << 10, std::size_t{1} << 20};  // elements

// False when a decoder refused what its encoder wrote.
bool measure(std::string_view text, std::size_t elements) {
  const auto compression = bps::compress::parse_compression(text);
  const Codec& codec = *compression->codec;
  std::mt19937 generator(1);
  std::normal_distribution<float> distribution(0, 1e-3F);
  std::vector<float> gradient(elements);
  for (float& value : gradient) value = distribution(generator);
  std::vector<float> values(elements);
  std::vector<std::byte> wire(codec.encoded_size(elements));
  const double bytes = static_cast<double>(elements * sizeof(float));
  const std::size_t repeats = std::max<std::size_t>(1, (std::size_t{4} << 20) / elements);

  bool accepted = true;
  double encode_s = 1e9;
  double decode_s = 1e9;
  double add_s = 1e9;
  double memcpy_s = 1e9;
  for (int round = 0; round < 15; ++round) {
    const auto decode = [&](Into into) { accepted &= codec.decode(wire, values, into) == Decoded::kOk; };
    encode_s = std::min(encode_s, seconds_when_warm(repeats, [&] { codec.encode(gradient, wire, 1); }));
    decode_s = std::min(decode_s, seconds_when_warm(repeats, [&] { decode(Into::kReplace); }));
    add_s = std::min(add_s, seconds_when_warm(repeats, [&] { decode(Into::kAdd); }));
    memcpy_s = std::min(memcpy_s, seconds_when_warm(repeats, [&] {
                          std::memcpy(values.data(), gradient.data(), elements * sizeof(float));
                        }));
  }
  std::printf(
      "{\"codec\": \"%.*s\", \"elements\": %zu, \"bytes_per_element\": %.4f, \"encode_gbps\": %.2f, \"decode_gbps\": "
      "%.2f, "
      "\"add_gbps\": %.2f, \"memcpy_gbps\": %.2f}\n",
      static_cast<int>(text.size()), text.data(), elements,
      static_cast<double>(wire.size()) / static_cast<double>(elements), bytes / encode_s * 1e-9,
      bytes / decode_s * 1e-9, bytes / add_s * 1e-9, bytes / memcpy_s * 1e-9);
  std::fflush(stdout);
  return accepted;
}

}  // namespace

int main(int argc, char** argv) {
  bool accepted = true;
  const std::vector<std::string_view> texts =
      argc > 1 ? std::vector<std::string_view>(argv + 1, argv + argc) : bps::compress::codec_names();
  for (const std::string_view text : texts) {
    for (const std::size_t elements : kSizes) accepted &= measure(text, elements);
  }
  return accepted ? 0 : 1;
}
