// SPDX-License-Identifier: Apache-2.0
// libFuzzer: what a host says that its ranks' exact sum is, as a server reads it. The first byte names the dtype, the
// second how many elements there are, the third a divisor; the rest is what came off the wire.
//
// The reader stays within its bytes, and a sum of it has a result, whatever they are. What a host makes of any numbers
// fits its room, and gives their sum.
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "fuzz/fuzz.h"
#include "server/exact_sum.h"
#include "server/superaccumulator.h"

using namespace bps;
using server::Superaccumulator;

constexpr std::array kDtypes{Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBfloat16};

// As a server adds it to what another rank has sent as it is.
static void read(Dtype dtype, std::uint64_t elements, std::uint32_t divisor, std::span<const std::byte> bytes) {
  std::vector<std::byte> plain(elements * size_of(dtype), std::byte{1});
  std::vector<std::byte> result(plain.size());
  for (const ReduceOp op : {ReduceOp::kExactSum, ReduceOp::kExactAverage}) {
    server::ExactSum sum;
    sum.begin({dtype, op, divisor});
    sum.add_unrounded({bytes, elements});
    sum.add_plain();
    const std::byte* at[] = {nullptr, plain.data()};
    std::byte* const into = result.data();
    sum.sum(0, elements, at, {&into, 1});
  }
}

// Two hosts: the numbers, and their opposites. Nothing is left of any of them.
static void cancel(std::uint64_t elements, std::span<const double> numbers) {
  const std::size_t ranks = numbers.size() / elements;
  if (ranks == 0) return;
  std::vector<double> opposite(numbers.begin(), numbers.end());
  for (double& one : opposite) one = -one;
  std::vector<std::vector<std::byte>> hosts;
  for (const double* values : {numbers.data(), static_cast<const double*>(opposite.data())}) {
    std::vector<std::byte>& bytes = hosts.emplace_back(tensor::most_unrounded_bytes(Dtype::kFloat64, elements));
    tensor::UnroundedWriter writer(bytes.data(), elements);
    server::ExactSum sum;
    sum.begin({Dtype::kFloat64, ReduceOp::kExactSum, 1}, &writer);
    std::vector<const std::byte*> at;
    for (std::size_t i = 0; i < ranks; ++i) {
      sum.add_plain();
      at.push_back(reinterpret_cast<const std::byte*>(values + i * elements));
    }
    std::byte* const into = writer.sums();
    sum.sum(0, elements, at, {&into, 1});
    writer.finish();
    const std::uint64_t used = tensor::unrounded_bytes(bytes.data(), elements);
    fuzz::expect(used > 0 && used <= bytes.size());
    bytes.resize(used);
  }
  server::ExactSum sum;
  sum.begin({Dtype::kFloat64, ReduceOp::kExactSum, 1});
  for (const auto& bytes : hosts) sum.add_unrounded({bytes, elements});
  const std::byte* at[] = {nullptr, nullptr};
  std::vector<double> result(elements);
  std::byte* const into = reinterpret_cast<std::byte*>(result.data());
  sum.sum(0, elements, at, {&into, 1});
  for (std::size_t i = 0; i < elements; ++i) {
    bool is_finite = true;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      is_finite &= (std::bit_cast<std::uint64_t>(numbers[rank * elements + i]) >> 52 & 0x7ff) != 0x7ff;
    }
    fuzz::expect(is_finite ? result[i] == 0 : result[i] != result[i]);
  }
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  const Dtype dtype = kDtypes[data[0] % kDtypes.size()];
  const std::uint64_t elements = 1 + data[1] % 70;
  const std::uint32_t divisor = 1 + data[2];
  std::vector<std::byte> wire(size - 3);  // exactly as long, so that the address checks see a byte too far
  if (!wire.empty()) std::memcpy(wire.data(), data + 3, wire.size());

  std::vector<double> numbers(wire.size() / sizeof(double));
  if (!numbers.empty()) std::memcpy(numbers.data(), wire.data(), numbers.size() * sizeof(double));
  cancel(elements, numbers);

  if (wire.size() < tensor::kUnroundedHeader) return 0;
  // What a server takes: no shorter than the elements, and no longer than what there is.
  const std::uint64_t bytes = tensor::unrounded_bytes(wire.data(), elements);
  if (bytes != 0 && bytes <= wire.size()) read(dtype, elements, divisor, std::span(wire).first(bytes));
  // Most inputs say something else; the rest of the reader is for them, too.
  if (wire.size() >= tensor::kUnroundedHeader + elements * sizeof(double)) read(dtype, elements, divisor, wire);
  return 0;
}
