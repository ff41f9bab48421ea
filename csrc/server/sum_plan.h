// SPDX-License-Identifier: Apache-2.0
// The memory that one pass over a gathered round reads and writes.
#pragma once

#include <vector>

#include "server/reduce.h"
#include "server/round.h"
#include "tensor/redo_log.h"

namespace bps::server {

// Memory that a pass reads or writes: here, or, where `bytes` is null, `span` in the memory of a worker.
struct SumMemory {
  std::byte* bytes = nullptr;
  transport::DirectAccess* direct = nullptr;
  transport::RemoteSpan span{};
  WorkerSession* session = nullptr;
  bool unrounded = false;  // a source as tensor/unrounded.h says; the span has the length of what may be read
  bool divide = false;     // a source that is to be averaged before it is added to others that have been
  bool averaged = false;   // a source that has been, and is added to others that have not
};

// The reduction that makes the payloads of a gathered round its sum.
Reduction reduction_of(const Round& round);

// Keeps its capacity between uses.
struct SumPlan {
  std::vector<SumMemory> sources;  // in the order of ranks
  std::vector<SumMemory> targets;
  tensor::RedoLog* log = nullptr;  // each block goes there first
  TraceKey key;                    // of what is written to the log

  // The payloads, where they are, but for those that are compressed.
  void read_from(const Round& round);
  // The memory of the members that wait for the result and can be reached. Returns whether a slot must take the result
  // for others: because it has to travel, or because their pull comes later.
  bool write_to(Round& round);
};

}  // namespace bps::server
