// SPDX-License-Identifier: Apache-2.0
// A prepared operation is described once and started many times, like a persistent request of MPI. All that can be
// checked or looked up is so when it is made. A start reuses the Operation of the last start, and so allocates nothing.
//
// One thread at a time may use it.
#pragma once

#include <memory>

#include "worker/operation.h"

namespace bps::worker {

struct PreparedOperation {
  std::shared_ptr<Tensor> tensor;      // another one in each view
  const Request request;               // its `awaited` means nothing: each start says it anew
  std::shared_ptr<Operation> current;  // the operation of the last start; null: the next start makes one
  DeviceMemory memory{};               // its streams are those of the next start
};

}  // namespace bps::worker
