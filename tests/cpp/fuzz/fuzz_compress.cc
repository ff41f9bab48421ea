// SPDX-License-Identifier: Apache-2.0
// libFuzzer: the decoders of compressed gradients. The first byte names the codec, the next two the element count; the
// rest is what came off the wire, cut or filled up to the right size unless the top bit of the first byte is set.
#include <cstring>
#include <vector>

#include "compress/codec.h"
#include "fuzz/fuzz.h"

using namespace bps;
using compress::Decoded;
using compress::Into;

constexpr float kUntouched = 5.0F;

static std::vector<std::shared_ptr<const compress::Codec>> make_all() {
  std::vector<std::shared_ptr<const compress::Codec>> all;
  for (const std::string_view name : compress::codec_names()) {
    compress::Parameters parameters;
    all.push_back(compress::make_codec(name, parameters));
  }
  return all;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  static const std::vector<std::shared_ptr<const compress::Codec>> codecs = make_all();
  const compress::Codec& codec = *codecs[(data[0] & 0x7fU) % codecs.size()];
  const std::size_t elements = (data[1] | data[2] << 8) % 1100;
  // Exactly as long as they are, so that the address checks see a byte too far.
  std::vector<std::uint8_t> wire(data + 3, data + size);
  if ((data[0] & 0x80) == 0) wire.resize(codec.encoded_size(elements));
  wire.shrink_to_fit();
  std::vector<float> values(elements, kUntouched);
  const auto bytes = std::as_bytes(std::span(wire));

  const Decoded result = codec.decode(bytes, values, Into::kReplace);
  fuzz::expect((result == Decoded::kWrongSize) == (wire.size() != codec.encoded_size(elements)));
  if (result != Decoded::kOk) {
    for (const float value : values) fuzz::expect(value == kUntouched);
  }
  fuzz::expect(codec.decode(bytes, values, Into::kAdd) == result);

  // Whatever floats there are, a codec accepts what it writes.
  std::vector<float> any(wire.size() / sizeof(float));
  if (!any.empty()) std::memcpy(any.data(), wire.data(), any.size() * sizeof(float));
  std::vector<std::byte> encoded(codec.encoded_size(any.size()));
  codec.encode(any, encoded, size);
  fuzz::expect(codec.decode(encoded, any, Into::kReplace) == Decoded::kOk);
  return 0;
}
