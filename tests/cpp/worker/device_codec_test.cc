// SPDX-License-Identifier: Apache-2.0
// Compressed sums of a GPU's memory, on the fake driver: equal to those of the host for every codec, and quiet after
// errors.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "compress/compression.h"
#include "compress/elements.h"
#include "worker/device_route.h"

namespace bps::worker::testing {
namespace {

// Elements of either sign and many sizes.
std::vector<std::byte> draw(std::size_t bytes, Dtype dtype, unsigned seed) {
  std::minstd_rand random(seed + 1);
  std::vector<float> values(bytes / size_of(dtype));
  for (float& value : values)
    value = std::ldexp(static_cast<float>(random() % 2001) - 1000, -static_cast<int>(random() % 12));
  std::vector<std::byte> elements(bytes);
  compress::narrow(dtype, values, elements.data());
  return elements;
}

class DeviceCodecTest : public DeviceRouteTest {
 protected:
  DeviceCodecTest() {
    for (const auto& server : server_loops) server->add_group(*other);
  }
  std::shared_ptr<Tensor> compressed(std::uint32_t pieces, const std::shared_ptr<const van::Group>& of,
                                     const std::string& text, Dtype dtype = Dtype::kFloat32) {
    auto tensor = declare(pieces, of);
    tensor->dtype = dtype;
    tensor->compression = text;
    tensor->compressor = std::make_unique<Compressor>(
        compress::parse_compression(text), dtype, tensor->bytes / size_of(dtype), tensor->whole, tensor->whole.count());
    return tensor;
  }
  std::vector<std::byte> sum_on_host(const std::shared_ptr<Tensor>& tensor, std::vector<std::byte> values,
                                     std::uint32_t round) {
    Request request;
    request.input = request.output = values.data();
    request.input_allocation = request.output_allocation = {values, ++identity};
    const auto operation = std::make_shared<Operation>(tensor, request, round, sequence++, 1, kServers);
    worker_loop.submit(operation, true);
    turn_until([&] { return operation->is_done(); });
    operation->rethrow();
    return values;
  }
  std::uint64_t compressed_bytes() { return reactor.counters().compressed_bytes.get(); }

  std::uint64_t identity = 1 << 20;
  const std::shared_ptr<const van::Group> other = std::make_shared<const van::Group>(van::Group{2, {0}});
};

// Methods and parameters, and what the tensor has.
using Case = std::tuple<std::string, std::string, Dtype>;

class DeviceCodec : public DeviceCodecTest, public ::testing::WithParamInterface<Case> {};

TEST_P(DeviceCodec, GivesWhatItGivesTheHost) {
  const auto& [method, more, dtype] = GetParam();
  const std::string text = method + ":everywhere=1" + more;
  const auto on_device = compressed(5, group, text, dtype), on_host = compressed(5, other, text, dtype);
  on_host->id = on_device->id;  // random methods draw the same
  std::uint64_t travelled = compressed_bytes();
  for (unsigned round = 0; round < 3; ++round) {
    const auto values = draw(on_device->bytes, dtype, round);
    const auto expected = sum_on_host(on_host, values, round);
    const std::uint64_t by_host = compressed_bytes() - travelled;
    const std::uint64_t copied = reactor.counters().copied_bytes.get();
    const std::uint64_t by_device = reactor.counters().device_bytes.get();
    const Sent sent = send(on_device, values, round);
    await(sent);
    sent.operation->rethrow();
    EXPECT_EQ(sent.output->read(), expected) << "in round " << round;
    EXPECT_EQ(sent.input->read(), values);
    EXPECT_TRUE(sent.output->is_contained());
    EXPECT_EQ(compressed_bytes() - travelled, 2 * by_host);
    EXPECT_EQ(by_host > 0, on_host->compressor->shortens());
    EXPECT_EQ(reactor.counters().copied_bytes.get(), copied) << "the processor copies nothing";
    EXPECT_EQ(reactor.counters().device_bytes.get() - by_device, 2 * values.size());
    travelled = compressed_bytes();
  }
}

INSTANTIATE_TEST_SUITE_P(Of, DeviceCodec,
                         ::testing::Combine(::testing::Values("bf16", "fp16", "mxfp8", "fp8", "int8", "int4", "onebit",
                                                              "topk", "randomk", "dithering"),
                                            ::testing::Values("", ",feedback=1", ",momentum=0.9",
                                                              ",feedback=1,momentum=0.9"),
                                            ::testing::Values(Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16)));

constexpr const char* kExact = "bf16:everywhere=1";  // of what fit() makes

std::vector<std::byte> fit(std::size_t bytes) {
  std::vector<float> values(bytes / sizeof(float));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 151 + i * sizeof(float) / kPiece);
  std::vector<std::byte> elements(bytes);
  std::memcpy(elements.data(), values.data(), bytes);
  return elements;
}

TEST_F(DeviceCodecTest, ManyAtOnceBesideThoseOfTheHost) {
  for (int i = 0; i < 5; ++i) {
    std::vector<Sent> all;
    std::vector<std::shared_ptr<Operation>> of_host;
    for (std::uint32_t k = 0; k < 20; ++k) {
      const auto tensor = compressed(1 + k % 3, group, kExact);
      all.push_back(send(tensor, fit(tensor->bytes)));
      if (k % 4 == 0) of_host.push_back(submit(1 + k % 3, 0));
    }
    for (const Sent& one : all) {
      await(one);
      one.operation->rethrow();
      EXPECT_EQ(one.output->read(), one.input->read());
    }
    for (const auto& one : of_host) turn_until([&] { return one->is_done(); });
  }
}

class DeviceCodecEnd : public DeviceCodecTest, public ::testing::WithParamInterface<int> {
 protected:
  Sent begin_compressed() {
    const auto tensor = compressed(kPieces, group, kExact);
    return begin(GetParam(), tensor, fit(tensor->bytes));
  }

 public:
  using DeviceRouteTest::kCopies;
};

TEST_P(DeviceCodecEnd, NothingChangesAfterAnAbort) {
  const Sent sent = begin_compressed();
  expect_quiet_end(sent, [this] { abort_all(); });
  const auto next = compressed(kPieces, group, kExact);
  const Sent after = send(next, fit(next->bytes));
  await(after);
  after.operation->rethrow();
  EXPECT_EQ(after.output->read(), after.input->read());
}

TEST_P(DeviceCodecEnd, NothingChangesOnceAllServersAreLost) {
  const Sent sent = begin_compressed();
  expect_quiet_end(sent, [this] { lose_all(); });
}

INSTANTIATE_TEST_SUITE_P(AtAnyMoment, DeviceCodecEnd, ::testing::Range(0, DeviceCodecEnd::kCopies, 11));

}  // namespace
}  // namespace bps::worker::testing
