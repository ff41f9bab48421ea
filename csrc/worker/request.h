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
  bool pushes = true;  // with kSplit, push() and pull() are two requests of one round
  bool pulls = true;
  std::uint32_t root = 0;       // for kBroadcast and kStore: see PushHeader::root
  tensor::Addition addition{};  // for kAccumulate; with `again` the worker counts its tries
  bool again = false;           // for kAccumulate: sends the latest addition again, whatever servers have of it
  std::byte* input = nullptr;   // with kReduceScatter the whole tensor; with kAllGather the rank's shard
  std::byte* output = nullptr;  // with kReduceScatter the rank's shard; with kAllGather the whole tensor
  transport::Allocation input_allocation;  // the blocks around them, which are registered; of a GPU the arrays
  transport::Allocation output_allocation;
  std::int32_t priority = 0;  // higher first
  double timeout_s = 300;
  // A lost server costs such an operation nothing: see tensor::kTwoPhase. kSplit cannot have it, because its push is
  // over before its round is.
  bool survives_servers = false;
  bool awaited = false;  // its caller waits next and works for the loop: if it is alone, no thread need be woken
};

// Returns true for the own bytes of an all_gather that lie elsewhere than in its result. They have to go there, too.
inline bool is_own_part_beside(const Request& request, const tensor::Extent& extent) {
  return request.kind == tensor::OperationKind::kAllGather && extent.has_payload() &&
         request.output + extent.output_offset != request.input + extent.input_offset;
}

// Names the device whose memory the input and the output are. Without a device they are the host's.
struct DeviceMemory {
  device::Device* device = nullptr;
  std::array<std::uintptr_t, 2> streams{};  // these must reach the call before either is used; 0: none
};

}  // namespace bps::worker
