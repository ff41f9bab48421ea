// SPDX-License-Identifier: Apache-2.0
// Error feedback beside a codec of the program that fails: the next rounds send nothing of the failed one.
#include "worker/compressor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "compress/codec_call.h"
#include "compress/compression.h"

namespace bps::worker {
namespace {

constexpr std::size_t kCount = 64;

// Sends the upper halves of floats. Its decode() fails if that is wanted.
class Halves : public compress::Codec {
 public:
  std::size_t encoded_size(std::size_t elements) const override { return 2 * elements; }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const override {
    for (std::size_t i = 0; i < from.size(); ++i) {
      std::memcpy(to.data() + 2 * i, reinterpret_cast<const std::byte*>(&from[i]) + 2, 2);
    }
  }
  compress::Decoded decode(std::span<const std::byte> from, std::span<float> to, compress::Into into) const override {
    if (fails) {
      compress::CodecCall::fail("decode() of the codec 'halves' failed");
      return compress::Decoded::kFailed;
    }
    for (std::size_t i = 0; i < to.size(); ++i) {
      float value = 0;
      std::memcpy(reinterpret_cast<std::byte*>(&value) + 2, from.data() + 2 * i, 2);
      to[i] = into == compress::Into::kSubtract ? to[i] - value : value;
    }
    return compress::Decoded::kOk;
  }
  bool is_built_in() const override { return false; }

  bool fails = false;
};

TEST(FailingCodec, LeavesNothingToLaterRounds) {
  const auto codec = std::make_shared<Halves>();
  const auto compression = std::make_shared<compress::Compression>();
  compression->text = "halves:feedback=1";
  compression->codec = codec;
  compression->feedback = true;
  const tensor::Partitioning cut(kCount * sizeof(float), sizeof(float), kCount * sizeof(float));
  Compressor compressor(compression, Dtype::kFloat32, kCount, cut, cut.count());
  tensor::Extent extent;
  extent.length = kCount * sizeof(float);
  compressor.apply(extent);
  Counters counters;
  std::vector<std::byte> code(extent.payload_bytes());
  const auto encode = [&](float value) {
    const std::vector<float> gradient(kCount, value);
    return compressor.encode(0, 0, extent, reinterpret_cast<const std::byte*>(gradient.data()), Dtype::kFloat32,
                             code.data(), 1, counters);
  };

  compressor.note_failure();  // another loop has failed the operation before this one encodes its partition
  codec->fails = true;
  EXPECT_EQ(encode(3), Status::kCodec);
  EXPECT_NE(compress::CodecCall::take_failure(), "");
  codec->fails = false;
  ASSERT_EQ(encode(1), Status::kOk);
  std::vector<float> sent(kCount);
  ASSERT_EQ(compressor.decode(extent, code.data() + compress::kLabelBytes, reinterpret_cast<std::byte*>(sent.data()),
                              counters),
            Status::kOk);
  EXPECT_EQ(sent, std::vector<float>(kCount, 1));
}

}  // namespace
}  // namespace bps::worker
