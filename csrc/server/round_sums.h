// SPDX-License-Identifier: Apache-2.0
// Sums rounds whose pushes have all come, in one pass over the payloads, or over their codes.
//
// A pass reads the payloads where they are, and writes the result where members can be reached, and into a slot for the
// others. Without a free slot the round waits in the RoundQueue. Where a pass fails, the round fails, or the worker
// whose memory cannot be reached is lost. Belongs to the server loop's thread.
#pragma once

#include <string>

#include "server/compressed_sum.h"
#include "server/round_ends.h"
#include "server/round_queue.h"
#include "server/sum.h"
#include "server/sum_plan.h"

namespace bps::server {

class RoundSums {
 public:
  // All of these must outlive it. `name` is that of this process, for errors that members are told.
  RoundSums(RoundEnds& ends, RoundQueue& queue, SlotPool& pool, CompressedSummer& compressed, const std::string& name)
      : ends_(ends), queue_(queue), pool_(pool), compressed_(compressed), name_(name) {}

  // Returns the memory that the next pass reads and writes.
  SumPlan& plan() { return plan_; }
  // Plans to write the result to all members that wait. Returns false where there is no slot for the others, and the
  // round waits.
  bool plan_targets(Round& round) { return !plan_.write_to(round) || plan_slot(round); }
  // Plans to read or to write what this server feeds back for the partition. Returns false where the round has failed.
  bool plan_feedback(Round& round);
  // Runs the pass as planned. Returns false where it has failed; the round has then failed with it, or will soon.
  bool run(Round& round, const Reduction& what) {
    WorkerSession* broken = nullptr;
    const Status status = summer_.sum(what, round.first.length, plan_, broken);
    if (status != Status::kOk) [[unlikely]]
      end_pass(round, status, broken);
    return status == Status::kOk;
  }
  // Returns the result in a slot, for members that it is sent to or that pull later, or null where there is none.
  static const std::byte* result_of(const Round& round) {
    return round.result == nullptr ? nullptr : round.result->payload();
  }

  // Sums codes, and answers the round.
  void sum_compressed(Round& round);
  // Sums the payloads of a host's ranks as its contribution. It is rounded, or as tensor/unrounded.h says, or, for
  // 16-bit floats, may be float32, and is then not averaged.
  Status sum_contribution(const Round& round, Dtype as, std::byte* into);
  // Returns kOverflow where the sum of a mean of integers does not fit their type, so that the host cannot contribute.
  Status check_fit(Round& round, WorkerSession*& broken);

  void end_pass(Round& round, Status status, WorkerSession* broken);
  static Error no_memory();

 private:
  bool plan_slot(Round& round);
  bool find_result_slot(Round& round);

  RoundEnds& ends_;
  RoundQueue& queue_;
  SlotPool& pool_;
  CompressedSummer& compressed_;
  const std::string name_;
  Summer summer_;
  SumPlan plan_;  // keeps its capacity
};

}  // namespace bps::server
