// SPDX-License-Identifier: Apache-2.0
// Holds the options of a worker, which the start of the process decides. Only Worker::limit_partitions() changes one
// later.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/trace_writer.h"
#include "tensor/key_map.h"
#include "tensor/partition.h"
#include "van/hosts.h"
#include "van/server_places.h"
#include "van/server_weights.h"

namespace bps::worker {

struct WorkerOptions {
  tensor::KeyMapConfig key_map;
  tensor::CutRule cut;
  van::ServerPlaces server_places;
  // Say how much each server sums for a group. Without weights the servers of key_map take turns.
  std::optional<van::ServerWeights> weights;
  // Has the server rank of each worker rank's own process, so that reduce_scatter sums a shard where it is wanted; or
  // empty.
  std::vector<std::uint32_t> own_server;
  van::Hosts hosts;
  bool times_operations = false;
  TraceWriter* trace = nullptr;   // outlives the worker, and is told the names of tensors; null: there is none
  bool survives_servers = false;  // operations survive the loss of servers: see tensor::kTwoPhase
};

}  // namespace bps::worker
