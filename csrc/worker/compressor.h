// SPDX-License-Identifier: Apache-2.0
// Compresses one declared tensor on this rank: it encodes and decodes its partitions, and keeps what is remembered of
// each from round to round. Codecs and memory see float32, also where the tensor has 16-bit floats.
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
  // Makes one for a tensor of a compressible type with so many elements, and no more than `partitions` by any cut.
  // `whole` is the cut of push_pulls. Throws std::bad_alloc.
  Compressor(std::shared_ptr<const compress::Compression> compression, Dtype dtype, std::uint64_t elements,
             const tensor::Partitioning& whole, std::uint64_t partitions);

  const compress::Compression& compression() const { return *compression_; }
  // Makes the memory that encoding and decoding takes, but for what is rare. It is set-up, for each thread that may do
  // these.
  void make_scratch() const;
  // Returns false where the code of a whole partition would be no shorter than the partition, as with 16 bits for each
  // of 16-bit floats, or a small tensor. The tensor then travels as if it were not compressed, by all routes.
  bool shortens() const { return shortens_; }
  // Returns true for the kinds of operation that are compressed: those that add. Others travel as they are.
  bool applies(tensor::OperationKind kind, ReduceOp op) const {
    const bool adds = op == ReduceOp::kSum || op == ReduceOp::kAverage;
    return adds && shortens_ &&
           (kind == tensor::OperationKind::kPushPull || kind == tensor::OperationKind::kReduceScatter);
  }
  // Binds what is remembered to the cut of one kind of operation, the first one. Returns false for another kind.
  bool bind(tensor::OperationKind kind);

  // Returns true when something is kept from round to round.
  bool remembers() const { return compression_->feedback || compression_->momentum != 0; }
  // Returns false for a partition that travels as it is, since its code would be no shorter.
  bool is_shorter(std::uint64_t bytes) const { return compress::kLabelBytes + encoded_size(bytes) < bytes; }
  // Makes the extent that of a partition which travels compressed, if that is shorter.
  void apply(tensor::Extent& extent) const {
    if (!is_shorter(extent.length)) return;
    extent.flags |= tensor::kCompressed;
    extent.encoded = encoded_size(extent.length);
  }

  // Encodes a partition that lies at `offset` in the tensor: label and code, extent.payload_bytes() of them. To be
  // called once for each push, with a seed of its own. The elements at `from` need no alignment, and are of type `as`:
  // the tensor's, or float32, as a host has summed them. Returns kCodec where the codec is the program's own, and has
  // failed.
  Status encode(std::uint64_t partition, std::uint64_t offset, const tensor::Extent& extent, const std::byte* from,
                Dtype as, std::byte* into, std::uint64_t seed, Counters& counters);
  // Returns kProtocol when these are not bytes that the method writes, or kCodec; then it writes nothing.
  Status decode(const tensor::Extent& extent, const std::byte* from, std::byte* into, Counters& counters) const;

  // Forgets what was remembered, because a round has failed, perhaps for some partitions only. A caller that repeats
  // the round would otherwise send twice what had been left over.
  void note_failure() { failures_.fetch_add(1, std::memory_order_relaxed); }

  // Holds what is remembered of all elements, for a checkpoint; empty where the compression remembers nothing. It may
  // be written. remembered() is for a tensor with this cut, while no operation on it is in progress.
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
  void forget_failed(std::uint64_t partition, std::uint64_t first, std::size_t count);
  void forget(std::uint64_t first, std::size_t count);

  const std::shared_ptr<const compress::Compression> compression_;
  const compress::Label label_;
  const Dtype dtype_;
  const std::uint64_t element_bytes_;
  const std::uint64_t largest_;  // bytes of the largest partition
  const bool shortens_;
  Memory residual_;  // with feedback
  Memory momentum_;  // with momentum
  std::atomic<std::uint32_t> failures_{0};
  std::vector<std::uint32_t> failures_seen_;  // by partition; only the loop that encodes it touches its entry
  static constexpr std::uint8_t kUnbound = 0xff;
  std::atomic<std::uint8_t> bound_{kUnbound};
};

}  // namespace bps::worker
