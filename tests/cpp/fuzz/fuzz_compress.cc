// SPDX-License-Identifier: Apache-2.0
// libFuzzer: the decoders of compressed gradients. The first byte names the codec, the next two the element count, the
// fourth its parameters; the rest is what came off the wire, cut or filled up to the right size unless the top bit of
// the first byte is set. And the parameters themselves, as members write them.
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "compress/codec.h"
#include "compress/compression.h"
#include "core/error.h"
#include "fuzz/fuzz.h"

using namespace bps;
using compress::Decoded;
using compress::Into;

constexpr float kUntouched = 5.0F;

// Parameters that a method has, in all ways that it can have them, and those that it has not: it says which.
constexpr std::string_view kParameters[] = {"",
                                            "k=0.01",
                                            "k=1",
                                            "k=3",
                                            "k=1000000",
                                            "scaling=0",
                                            "scaling=1",
                                            "k=2,partition=natural",
                                            "k=7,partition=linear,normalize=l2",
                                            "k=4,partition=natural,normalize=l2",
                                            "row=1",
                                            "row=100000",
                                            "feedback=1,momentum=0.9",
                                            "seed=7"};

static std::vector<std::shared_ptr<const compress::Codec>> make_all() {
  std::vector<std::shared_ptr<const compress::Codec>> all;
  for (const std::string_view name : compress::codec_names()) {
    const std::size_t before = all.size();
    for (const std::string_view parameters : kParameters) {
      const std::string text = std::string(name) + (parameters.empty() ? "" : ":") + std::string(parameters);
      try {
        all.push_back(compress::parse_compression(text)->codec);
      } catch (const Error& error) {
        fuzz::expect(error.code() == ErrorCode::kInvalidArgument);
      }
    }
    fuzz::expect(all.size() > before);
  }
  return all;
}

// A label that a member writes: a server makes a codec of it or refuses it, and nothing else. How long a code is must
// be known for every length of partition.
static void parse(std::string_view text) {
  try {
    const auto compression = compress::parse_compression(text);
    for (const std::size_t elements : {std::size_t{1}, std::size_t{1000}, std::size_t{1} << 28}) {
      fuzz::expect(compression->codec->encoded_size(elements) <= elements * 9 + 4096);
    }
  } catch (const Error& error) {
    fuzz::expect(error.code() == ErrorCode::kInvalidArgument);
  }
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  parse({reinterpret_cast<const char*>(data), size});
  static const std::vector<std::shared_ptr<const compress::Codec>> codecs = make_all();
  const compress::Codec& codec = *codecs[((data[0] & 0x7fU) * std::size(kParameters) + data[3]) % codecs.size()];
  const std::size_t elements = (data[1] | data[2] << 8) % 1100;
  // Exactly as long as they are, so that the address checks see a byte too far.
  std::vector<std::uint8_t> wire(data + 4, data + size);
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
