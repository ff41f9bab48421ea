// SPDX-License-Identifier: Apache-2.0
// Tells where each partition of an operation lies in the caller's memory.
#pragma once

#include <cstdint>

#include "tensor/partition.h"
#include "tensor/placement.h"

namespace bps::worker {

struct PartitionLayout {
  tensor::PlacementRequest request;
  const tensor::Partitioning* cut = nullptr;

  tensor::Placement place(std::uint32_t partition) const { return tensor::place(request, *cut, partition); }
};

}  // namespace bps::worker
