// SPDX-License-Identifier: Apache-2.0
// How fast the reducer is beside memcpy: one JSON line per instruction set, element type, shape and size.
//
// payload_gbps counts the bytes of one source, traffic_gbps all bytes read and written; memcpy_gbps is the traffic of
// a memcpy of the same size, so traffic_gbps / memcpy_gbps = share says how close the pass is to the memory's speed.
// Both take turns and the best of many rounds counts, because a shared machine only ever makes things slower.
//
// How to read share: it compares bytes that the program names, not what the memory moves. In place it may well exceed
// 1, since a line that was read first is not fetched again before it is written, as memcpy's target may be; apart from
// the sources it is lower, also because more buffers must fit into the caches than memcpy's two.
//
//   reduce_bench [isa]      e.g. reduce_bench avx2
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "passes.h"
#include "server/reduce.h"

namespace {

using bps::Dtype;

struct Shape {
  std::size_t sources;
  std::size_t destinations;  // the first of them are the sources, in place, as on a server
  bool in_place;
};

constexpr Shape kShapes[] = {{2, 1, true}, {2, 2, true}, {2, 2, false}, {4, 4, true}, {8, 8, true}, {32, 1, true}};
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};
constexpr std::size_t kSizes[] = {std::size_t{256} << 10, std::size_t{4} << 20, std::size_t{64} << 20};

void measure(std::string_view isa, Dtype dtype, const Shape& shape, std::size_t bytes) {
  const Buffers buffers(shape.sources + (shape.in_place ? 0 : shape.destinations), bytes);
  const std::vector<const std::byte*> sources(buffers.pointers.begin(), buffers.pointers.begin() + shape.sources);
  const auto first = buffers.pointers.begin() + (shape.in_place ? 0 : shape.sources);
  const std::vector<std::byte*> destinations(first, first + shape.destinations);
  const std::size_t streams = shape.sources + shape.destinations;
  const std::size_t repeats = std::max<std::size_t>(1, (std::size_t{32} << 20) / (bytes * streams));

  double reduce_s = 1e9;
  double memcpy_s = 1e9;
  for (int round = 0; round < 15; ++round) {
    reduce_s = std::min(reduce_s, seconds_when_warm(repeats, [&] {
                          bps::server::reduce({dtype, bps::ReduceOp::kSum, 1}, sources, destinations,
                                              bytes / bps::size_of(dtype));
                        }));
    memcpy_s = std::min(
        memcpy_s, seconds_when_warm(repeats, [&] { std::memcpy(buffers.pointers[0], buffers.pointers[1], bytes); }));
  }
  const double traffic = static_cast<double>(streams * bytes) / reduce_s * 1e-9;
  const double copy = 2 * static_cast<double>(bytes) / memcpy_s * 1e-9;
  std::printf(
      "{\"isa\": \"%.*s\", \"dtype\": \"%.*s\", \"sources\": %zu, \"destinations\": %zu, \"in_place\": %s, "
      "\"bytes\": %zu, \"payload_gbps\": %.2f, \"traffic_gbps\": %.2f, \"memcpy_gbps\": %.2f, \"share\": %.2f}\n",
      static_cast<int>(isa.size()), isa.data(), static_cast<int>(bps::to_string(dtype).size()),
      bps::to_string(dtype).data(), shape.sources, shape.destinations, shape.in_place ? "true" : "false", bytes,
      static_cast<double>(bytes) / reduce_s * 1e-9, traffic, copy, traffic / copy);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  for (const std::string_view isa : bps::server::available_reduce_isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    bps::server::set_reduce_isa(isa);
    for (const Dtype dtype : kDtypes) {
      for (const Shape& shape : kShapes) {
        for (const std::size_t bytes : kSizes) {
          if (bytes * shape.sources <= std::size_t{512} << 20) measure(isa, dtype, shape, bytes);
        }
      }
    }
  }
  return 0;
}
