// SPDX-License-Identifier: Apache-2.0
// The compression of one declared tensor on this rank: how its partitions are encoded and decoded, and what is
// remembered of each from round to round. Codecs and memory see float32, of tensors of 16-bit floats too.
//
// Each partition belongs to one worker loop, which alone encodes it; note_failure() and bind() may be called from any
// thread. Memory is allocated by the constructor; pages of partitions that this rank never encodes cost nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "compress/compression.h"
#include "compress/elements.h"
#include "compress/label.h"
#include "core/error.h"
#include "core/metrics.h"
#include "tensor/extent.h"
#include "tensor/partition.h"

namespace bps::worker {

class Compressor {
 public:
  // Makes one for a tensor of a compressible type with so many elements, which no cut makes more partitions of. `whole`
  // is the cut of push_pulls. Throws std::bad_alloc.
  Compressor(std::shared_ptr<const compress::Compression> compression, Dtype dtype, std::uint64_t elements,
             const tensor::Partitioning& whole, std::uint64_t partitions);

  const compress::Compression& compression() const { return *compression_; }
  // Set-up, for a thread that may encode and decode: makes the memory that this takes, but for what is rare.
  void make_scratch() const;
  // False where the code of a whole partition would be no shorter than the partition: 16 bits for each of 16-bit
  // floats, or a small tensor. It then travels as if it were not compressed, by all routes.
  bool shortens() const { return shortens_; }
  // True for the kinds of operation that are compressed: those that add. Others travel as they are.
  bool applies(tensor::OperationKind kind, ReduceOp op) const {
    const bool adds = op == ReduceOp::kSum || op == ReduceOp::kAverage;
    return adds && shortens_ &&
           (kind == tensor::OperationKind::kPushPull || kind == tensor::OperationKind::kReduceScatter);
  }
  // Binds what is remembered to the cut of one kind of operation, the first one. False for another kind.
  bool bind(tensor::OperationKind kind);

  // Makes it a partition that travels compressed, if that is shorter.
  void apply(tensor::Extent& extent) const {
    if (!is_shorter(extent.length)) return;
    extent.flags |= tensor::kCompressed;
    extent.encoded = encoded_size(extent.length);
  }

  // Encodes a partition that lies at this place of the tensor: label and code, extent.payload_bytes() of them. Once
  // for each push, whose seed this is. The elements at `from` need no alignment, and are of type `as`: the tensor's, or
  // float32, as a host has summed them. kCodec: the codec is the program's own, and has failed.
  Status encode(std::uint64_t partition, std::uint64_t offset, const tensor::Extent& extent, const std::byte* from,
                Dtype as, std::byte* into, std::uint64_t seed, Counters& counters);
  // kProtocol when these are not bytes that the method writes, or kCodec; then it writes nothing.
  Status decode(const tensor::Extent& extent, const std::byte* from, std::byte* into, Counters& counters) const;

  // A round has failed, perhaps for some partitions only: what was remembered is forgotten, because a caller that
  // repeats it would send twice what had been left over.
  void note_failure() { failures_.fetch_add(1, std::memory_order_relaxed); }

  // Copies what is remembered of all elements, for a checkpoint; empty where the compression remembers nothing. May be
  // written. Of a tensor with this cut, while no operation on it is in progress.
  struct Remembered {
    std::span<float> residual;
    std::span<float> momentum;
  };
  Remembered remembered(const tensor::Partitioning& cut);

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<float[], Free>;
  static Memory zeros(std::uint64_t elements);
  std::uint64_t elements_of(std::uint64_t bytes) const { return bytes / element_bytes_; }
  std::uint64_t encoded_size(std::uint64_t bytes) const {
    return compression_->codec->encoded_size(elements_of(bytes));
  }
  bool is_shorter(std::uint64_t bytes) const { return compress::kLabelBytes + encoded_size(bytes) < bytes; }
  void forget_failed(std::uint64_t partition, std::uint64_t first, std::size_t count);
  void forget(std::uint64_t first, std::size_t count);

  const std::shared_ptr<const compress::Compression> compression_;
  const compress::Label label_;
  const Dtype dtype_;
  const std::uint64_t element_bytes_;
  const std::uint64_t largest_;  // bytes of a partition
  const bool shortens_;
  Memory residual_;  // with feedback
  Memory momentum_;  // with momentum
  std::atomic<std::uint32_t> failures_{0};
  std::vector<std::uint32_t> failures_seen_;  // by partition; each is of the loop that encodes it
  static constexpr std::uint8_t kUnbound = 0xff;
  std::atomic<std::uint8_t> bound_{kUnbound};
};

}  // namespace bps::worker
