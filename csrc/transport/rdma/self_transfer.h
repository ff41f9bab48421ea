// SPDX-License-Identifier: Apache-2.0
// Sends from this process to itself over the NIC: the whole way of a push, checked byte by byte, for `bps doctor`.
#pragma once

#include <cstdint>
#include <string>

#include "transport/rdma/rail.h"

namespace bps::transport::rdma {

struct SelfTransfer {
  std::uint64_t bytes = 0;
  double gigabytes_per_second = 0;
  double round_trip_us = 0;  // that of a message and its answer, on the control plane
};

// Sends `bytes` bytes in writes of 1 MiB over `rail`. Throws Error when anything fails, or other bytes arrive.
SelfTransfer transfer_to_self(const Rail& rail, const RdmaOptions& options, std::uint64_t bytes, double timeout_s);

}  // namespace bps::transport::rdma
