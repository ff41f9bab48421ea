// SPDX-License-Identifier: Apache-2.0
// Cuts a tensor into partitions: step 1 of the walk. These are pure functions, and every rank computes the same cut.
//
// A tensor is `shards` equal runs of elements (the last ones are shorter, possibly empty, as in torch.chunk), so that
// reduce_scatter and all_gather can name one owner per partition. Each run is cut into partitions of at most
// `partition_bytes`. Plain push_pull has one shard.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bps::tensor {

class Partitioning {
 public:
  // Cuts a tensor of `bytes`, with elements of `element` bytes. partition_bytes is rounded down to a multiple of
  // `element`, at least one element. An empty tensor has no partitions.
  Partitioning(std::uint64_t bytes, std::uint32_t element, std::uint64_t partition_bytes, std::uint32_t shards = 1);

  struct Piece {
    std::uint64_t offset;  // bytes from the start of the tensor
    std::uint64_t length;  // bytes, never 0
    std::uint32_t shard;
  };
  // Cuts the same elements into the same pieces, where elements have `to` bytes instead of `from`.
  Partitioning with_elements_of(std::uint32_t from, std::uint32_t to) const;
  std::uint64_t count() const { return count_; }
  Piece piece(std::uint64_t index) const;  // index < count()

  // These return where shard `index` lies: offset and length in bytes; the length may be 0.
  std::uint64_t shard_offset(std::uint32_t index) const;
  std::uint64_t shard_length(std::uint32_t index) const;

 private:
  std::uint64_t bytes_;
  std::uint64_t shard_bytes_;  // those of a full shard
  std::uint64_t piece_bytes_;
  std::uint64_t pieces_in_shard_;  // how many a full shard has
  std::uint64_t count_;
};

// Returns the partition size for a tensor of `bytes`: `limit` (BYTEPS_PARTITION_BYTES), or less for a middle-sized
// tensor so that each of `loops` server loops gets several pieces to pipeline, but never less than `floor` bytes.
std::uint64_t partition_size(std::uint64_t bytes, std::uint64_t limit, std::uint32_t loops, std::uint64_t floor);

// Holds the one rule by which a job cuts its tensors. The scheduler accounts for the same cut as the workers make (key
// hash `balanced`).
struct CutRule {
  std::uint64_t partition_bytes = 512 << 10;
  std::uint64_t min_partition_bytes = 64 << 10;
  std::uint32_t server_loops = 1;  // how many all servers together have

  Partitioning cut(std::uint64_t bytes, std::uint32_t element, std::uint32_t shards = 1) const;
  void limit(std::uint64_t bytes) { partition_bytes = std::min(partition_bytes, bytes); }
  // Returns the rule for elements that become float32 on the way: a partition has as many of them as of float32.
  CutRule for_float32(std::uint32_t element) const;
};

// Returns the partition size for links of this speed: what they carry in a fifth of a millisecond, from 16 KiB to the
// default. The first answer can leave when all workers have sent a whole piece, so the pieces of slow links should be
// small. Each piece costs processor time, so those of fast links should not.
std::uint64_t partition_for_link(double bytes_per_s);

}  // namespace bps::tensor
