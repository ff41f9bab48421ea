// SPDX-License-Identifier: Apache-2.0
// Tells where each partition of an operation lies in the caller's memory.
#pragma once

#include <cstdint>

#include "tensor/extent.h"
#include "tensor/partition.h"

namespace bps::worker {

struct PartitionLayout {
  tensor::MemberCall request;
  const tensor::Partitioning* cut = nullptr;

  tensor::Extent extent_of(std::uint32_t partition) const { return tensor::extent_of(request, *cut, partition); }
};

}  // namespace bps::worker
