// SPDX-License-Identifier: Apache-2.0
// The compression of one declared tensor on this rank: how its partitions are encoded and decoded, and what is
// remembered of each from round to round.
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
#include "compress/label.h"
#include "core/error.h"
#include "core/metrics.h"
#include "tensor/partition.h"
#include "tensor/placement.h"

namespace bps::worker {

class Compressor {
 public:
  // Makes one for a tensor of float32 with so many elements, which no cut makes more partitions of. Throws
  // std::bad_alloc.
  Compressor(std::shared_ptr<const compress::Compression> compression, std::uint64_t elements,
             std::uint64_t partitions);

  const compress::Compression& compression() const { return *compression_; }
  // True for the kinds of operation that are compressed: those that add. Others travel as they are.
  static bool applies(tensor::OperationKind kind, ReduceOp op) {
    const bool adds = op == ReduceOp::kSum || op == ReduceOp::kAverage;
    return adds && (kind == tensor::OperationKind::kPushPull || kind == tensor::OperationKind::kReduceScatter);
  }
  // Binds what is remembered to the cut of one kind of operation, the first one. False for another kind.
  bool bind(tensor::OperationKind kind);

  // Makes it a partition that travels compressed, if that is shorter.
  void apply(tensor::Placement& placement) const {
    const std::uint64_t encoded = compression_->codec->encoded_size(placement.length / sizeof(float));
    if (compress::kLabelBytes + encoded >= placement.length) return;
    placement.flags |= tensor::kCompressed;
    placement.encoded = encoded;
  }

  // Encodes a partition that lies at this place of the tensor: label and code, placement.payload_bytes() of them. Once
  // for each push, whose seed this is. The bytes at `from` need no alignment.
  // kCodec: the codec is the program's own, and has failed.
  Status encode(std::uint64_t partition, std::uint64_t offset, const tensor::Placement& placement,
                const std::byte* from, std::byte* into, std::uint64_t seed, Counters& counters);
  // kProtocol when these are not bytes that the method writes, or kCodec; then it writes nothing.
  Status decode(const tensor::Placement& placement, const std::byte* from, std::byte* into, Counters& counters) const;

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
  void forget_failed(std::uint64_t partition, std::uint64_t first, std::size_t count);

  const std::shared_ptr<const compress::Compression> compression_;
  const compress::Label label_;
  Memory residual_;  // with feedback
  Memory momentum_;  // with momentum
  std::atomic<std::uint32_t> failures_{0};
  std::vector<std::uint32_t> failures_seen_;  // by partition; each is of the loop that encodes it
  static constexpr std::uint8_t kUnbound = 0xff;
  std::atomic<std::uint8_t> bound_{kUnbound};
};

}  // namespace bps::worker
