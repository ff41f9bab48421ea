// SPDX-License-Identifier: Apache-2.0
// Plans the memory that one pass over a gathered round reads and writes.
#pragma once

#include <vector>

#include "server/reduce.h"
#include "server/round.h"
#include "tensor/redo_log.h"

namespace bps::server {

// Names memory that a pass reads or writes: `bytes` in this process, or, where it is null, `span` in a worker's memory.
struct SumMemory {
  std::byte* bytes = nullptr;
  transport::DirectAccess* direct = nullptr;
  transport::RemoteSpan span{};
  WorkerSession* session = nullptr;
  bool unrounded = false;  // a source as tensor/unrounded.h says; the span has the length of what may be read
  bool divide = false;     // a source that is averaged before it is added to others that have been averaged
  bool averaged = false;   // a source that has been averaged, and is added to others that have not
};

// Returns the reduction that makes the payloads of a gathered round its sum.
Reduction reduction_of(const Round& round);

// A plan keeps its capacity between uses.
struct SumPlan {
  std::vector<SumMemory> sources;  // in the order of ranks
  std::vector<SumMemory> targets;
  tensor::RedoLog* log = nullptr;  // each block goes there first
  TraceKey key;                    // the partition that is written to the log

  // Makes the payloads the sources, where they are, except those that are compressed.
  void read_from(const Round& round);
  // Makes the memory of members that wait for the result, and can be reached, the targets. Returns whether a slot must
  // take the result for other members, because it has to travel, or because their pull comes later.
  bool write_to(Round& round);
};

}  // namespace bps::server
