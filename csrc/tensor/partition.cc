// SPDX-License-Identifier: Apache-2.0
#include "tensor/partition.h"

#include <algorithm>

namespace bps::tensor {
namespace {

// Sets how many pieces of one tensor each server loop gets: so many that sending, summing and answering overlap, and so
// few that each is large.
constexpr std::uint64_t kPiecesPerLoop = 4;
// Sizes come in these steps, so that tensors of almost equal size use equal partitions.
constexpr std::uint64_t kStep = std::uint64_t{64} << 10;
constexpr std::uint64_t kSmallStep = std::uint64_t{16} << 10;  // on links that take long for kStep

// Rounds up, without the overflow of a + b - 1.
std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace

Partitioning::Partitioning(std::uint64_t bytes, std::uint32_t element, std::uint64_t partition_bytes,
                           std::uint32_t shards)
    : bytes_(bytes) {
  const std::uint64_t unit = std::max<std::uint64_t>(element, 1);
  const std::uint64_t elements = divide_up(bytes, unit);
  shard_bytes_ = divide_up(elements, std::max<std::uint64_t>(shards, 1)) * unit;
  piece_bytes_ = std::max<std::uint64_t>(partition_bytes / unit, 1) * unit;
  pieces_in_shard_ = divide_up(shard_bytes_, piece_bytes_);
  count_ = 0;
  if (bytes > 0) {
    count_ = bytes / shard_bytes_ * pieces_in_shard_ + divide_up(bytes % shard_bytes_, piece_bytes_);
  }
}

Partitioning Partitioning::with_elements_of(std::uint32_t from, std::uint32_t to) const {
  Partitioning scaled = *this;
  for (std::uint64_t* bytes : {&scaled.bytes_, &scaled.shard_bytes_, &scaled.piece_bytes_}) *bytes = *bytes / from * to;
  return scaled;
}

Partitioning::Piece Partitioning::piece(std::uint64_t index) const {
  const auto shard = static_cast<std::uint32_t>(index / pieces_in_shard_);
  const std::uint64_t start = index % pieces_in_shard_ * piece_bytes_;
  return {shard_offset(shard) + start, std::min(piece_bytes_, shard_length(shard) - start), shard};
}

std::uint64_t Partitioning::shard_offset(std::uint32_t index) const {
  return std::min(index * shard_bytes_, bytes_);
}

std::uint64_t Partitioning::shard_length(std::uint32_t index) const {
  return std::min(shard_bytes_, bytes_ - shard_offset(index));
}

std::uint64_t partition_size(std::uint64_t bytes, std::uint64_t limit, std::uint32_t loops, std::uint64_t floor) {
  const std::uint64_t pieces = kPiecesPerLoop * std::max<std::uint64_t>(loops, 1);
  if (bytes / pieces >= limit) return limit;
  const std::uint64_t even = divide_up(divide_up(bytes, pieces), kStep) * kStep;
  return std::min(std::max(even, floor), limit);
}

std::uint64_t partition_for_link(double bytes_per_s) {
  constexpr double kTransit_s = 0.2e-3;
  constexpr CutRule kDefault;
  const auto bytes = static_cast<std::uint64_t>(std::clamp(bytes_per_s, 0.0, 1e12) * kTransit_s);
  if (bytes < kStep) return std::max<std::uint64_t>(divide_up(bytes, kSmallStep), 1) * kSmallStep;
  return std::min(bytes / kStep * kStep, kDefault.partition_bytes);
}

CutRule CutRule::for_float32(std::uint32_t element) const {
  CutRule rule = *this;
  rule.limit(std::max<std::uint64_t>(partition_bytes / sizeof(float), 1) * element);
  return rule;
}

Partitioning CutRule::cut(std::uint64_t bytes, std::uint32_t element, std::uint32_t shards) const {
  const std::uint64_t floor = std::min(min_partition_bytes, partition_bytes);
  return {bytes, element, partition_size(bytes, partition_bytes, server_loops, floor), shards};
}

}  // namespace bps::tensor
