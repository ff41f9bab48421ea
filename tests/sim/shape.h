// SPDX-License-Identifier: Apache-2.0
// What kind of job a seed stands for.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "network.h"
#include "tensor/push_header.h"

namespace bps::sim {

struct TensorShape {
  tensor::OperationKind kind = tensor::OperationKind::kPushPull;
  std::uint64_t elements = 0;  // of 32 bits
  bool in_place = true;        // kPushPull
};

// The servers get the weights that follow from these links, if that is possible just then.
struct ShiftShape {
  Duration at{};
  std::vector<std::uint64_t> links;  // by node: bytes per second
};

struct Shape {
  std::uint32_t workers = 2;
  std::uint32_t servers = 1;
  bool dedicated = true;               // servers are processes of their own
  std::uint32_t least = 1;             // workers with which the job goes on; 0: only with all
  bool failover = false;               // servers may be lost unseen
  std::vector<std::uint32_t> host_of;  // by process; empty: none shares its host
  bool host_sums = false;              // the ranks of a host sum first
  std::uint32_t steps = 3;
  std::uint32_t passes = 1;      // calls of each tensor in a step
  std::uint32_t open_calls = 2;  // of a worker at one time
  std::vector<TensorShape> tensors;
  std::uint64_t partition_bytes = 4096;
  std::uint64_t credit = 0;
  std::uint32_t window = 2;
  std::uint64_t slot_memory = 0;  // of a server
  std::size_t data_connections = 1;
  double hasty = 0;  // chance that a call has a deadline that may pass
  Duration silence = std::chrono::seconds(2);
  Conditions conditions;
  std::uint32_t faults = 0;
  std::uint32_t scheduler_deaths = 0;  // beyond them
  std::vector<ShiftShape> shifts;

  std::uint32_t processes() const { return workers + (dedicated ? servers : 0); }
  bool is_worker(std::uint32_t process) const { return process < workers; }

  static Shape draw(Random& random);

 private:
  void draw_hosts(Random& random);
  void draw_shifts(Random random);
};

}  // namespace bps::sim
