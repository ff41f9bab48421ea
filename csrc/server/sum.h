// One pass over a complete round: read every payload, write every result, block by block through the cache.
//
// Payloads are read where they are: in a landing slot, in mapped memory of a worker, or, by cross-memory copy, in its
// plain memory. Results go straight into the workers' tensors where those can be reached, and into `result` where an
// answer has to travel. Sums run in the order of the group's ranks, so that a result never depends on who came first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/error.h"
#include "server/round.h"

namespace bps::server {

struct SumSource {
  const std::byte* bytes = nullptr;  // null: fetch from `span`
  transport::DirectAccess* direct = nullptr;
  transport::RemoteSpan span{};
  WorkerSession* session = nullptr;
};
struct SumTarget {
  std::byte* bytes = nullptr;  // null: put into `span`
  transport::DirectAccess* direct = nullptr;
  transport::RemoteSpan span{};
  WorkerSession* session = nullptr;
};

class Summer {
 public:
  // Sums `length` bytes. A worker whose memory cannot be touched is reported in `broken` and ends the pass.
  Status sum(const tensor::PushHeader& what, std::uint32_t divisor, std::span<const SumSource> sources,
             std::span<const SumTarget> targets, std::uint64_t length, WorkerSession*& broken);

 private:
  std::byte* scratch(std::size_t index);

  std::vector<std::vector<std::byte>> scratch_;  // one block each; made at first use, then kept
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
};

}  // namespace bps::server
