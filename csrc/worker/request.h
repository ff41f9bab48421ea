// SPDX-License-Identifier: Apache-2.0
// A caller's request for one operation.
#pragma once

#include <array>
#include <cstdint>

#include "core/dtype.h"
#include "device/device.h"
#include "tensor/extent.h"
#include "tensor/operation_names.h"
#include "transport/region_cache.h"

namespace bps::worker {

using tensor::name_of;

struct Request {
  tensor::OperationKind kind = tensor::OperationKind::kPushPull;
  ReduceOp op = ReduceOp::kSum;
  bool pushes = true;  // kSplit: push() and pull() are two requests of one round
  bool pulls = true;
  std::uint32_t root = 0;                  // position in the group; kBroadcast, kStore
  tensor::Addition addition{};             // kAccumulate; with `again`, its tries are counted by the worker
  bool again = false;                      // kAccumulate: the latest addition, whatever servers have of it
  std::byte* input = nullptr;              // kReduceScatter: the whole tensor; kAllGather: the own shard
  std::byte* output = nullptr;             // kReduceScatter: the own shard; kAllGather: the whole tensor
  transport::Allocation input_allocation;  // the blocks around them, which are registered
  transport::Allocation output_allocation;
  std::int32_t priority = 0;  // higher first
  double timeout_s = 300;
  // A lost server then costs nothing: see tensor::kTwoPhase. kSplit cannot have it, because its push is over before its
  // round is.
  bool survives_servers = false;
  bool awaited = false;  // its caller waits next, and then works itself: if it is alone, nobody needs to be woken
};

// The device whose memory the input and the output are; null: they are the host's.
struct DeviceMemory {
  device::Device* device = nullptr;
  std::array<std::uintptr_t, 2> streams{};  // which must reach the call before either is used; 0: none
};

}  // namespace bps::worker
