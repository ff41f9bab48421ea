// SPDX-License-Identifier: Apache-2.0
// An operation that is described once and started many times, like a persistent request of MPI. Everything that can be
// checked or looked up is, when it is made; a start reuses the Operation of the last one, and so allocates nothing.
//
// Threading: one thread at a time.
#pragma once

#include <memory>

#include "worker/operation.h"

namespace bps::worker {

struct PreparedOperation {
  std::shared_ptr<Tensor> tensor;      // another one in each view
  const Request request;               // but for `awaited`, which each start says anew
  std::shared_ptr<Operation> current;  // of the last start; null: the next one makes another
  DeviceMemory memory{};               // its streams are those of the next start
};

}  // namespace bps::worker
