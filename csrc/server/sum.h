// SPDX-License-Identifier: Apache-2.0
// Makes one pass over a gathered round: it reads every payload and writes every result, block by block through the
// cache.
//
// Payloads are read where they are: in a landing slot, in mapped memory of a worker, or, by cross-memory copy, in its
// plain memory. Results go to all targets of the plan: straight into the workers' tensors where those can be reached,
// and into a slot where an answer has to travel. Sums run in the order of the group's ranks, so that a result never
// depends on who came first. Belongs to the server loop's thread.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/error.h"
#include "server/exact_sum.h"
#include "server/sum_plan.h"

namespace bps::server {

class Summer {
 public:
  // Sums the `length` bytes of one partition. A worker whose memory cannot be reached ends the pass and is named in
  // `broken`. With `unrounded` an exact sum goes there, and to no target. Where it returns kNoMemory nothing has been
  // written.
  Status sum(const Reduction& what, std::uint64_t length, const SumPlan& plan, WorkerSession*& broken,
             tensor::UnroundedWriter* unrounded = nullptr);
  // Adds 16-bit floats as float32, and neither rounds nor averages. Otherwise it is as sum().
  Status sum_as_float32(const Reduction& what, const SumPlan& plan, std::span<float> sum, WorkerSession*& broken);
  // Returns kOverflow where the sum of these integers does not fit their type. It writes nothing; otherwise it is as
  // sum().
  Status check_fit(Dtype dtype, std::uint64_t length, const SumPlan& plan, WorkerSession*& broken);

 private:
  Status begin_exact(const Reduction& what, std::uint64_t elements, const SumPlan& plan, WorkerSession*& broken,
                     tensor::UnroundedWriter* unrounded);
  Status read(const Reduction& what, const SumPlan& plan, std::uint64_t at, std::uint64_t size, std::size_t& used,
              WorkerSession*& broken);
  std::byte* scratch(std::size_t index);

  std::vector<std::vector<std::byte>> scratch_;  // one block each; made at first use, then kept
  std::vector<float> widened_;                   // a block of a source that is multiplied
  ExactSum exact_;
  std::vector<std::vector<std::byte>> copies_;  // copies of what hosts have summed and cannot be read where it lies
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
  std::vector<std::byte*> logged_;  // where a block goes once the redo log has it
};

}  // namespace bps::server
