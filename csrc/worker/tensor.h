// SPDX-License-Identifier: Apache-2.0
// Describes a declared name: its id, its cut into partitions, and which loop and server each partition belongs to.
//
// Declarations make a tensor once. From then on any thread reads it, and what changes is atomic. `alone` is made under
// their mutex, and the compressor has rules of its own.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "tensor/key_map.h"
#include "tensor/partition.h"
#include "van/membership.h"
#include "worker/compressor.h"
#include "worker/exactness.h"
#include "worker/flight_recorder.h"
#include "worker/transfer.h"
#include "worker/view_end.h"

namespace bps::worker {

using Plan = std::vector<std::vector<Part>>;

// Lists the partitions by [loop * places + place], for each of the two cuts.
struct Plans {
  std::uint32_t shift = 0;  // they follow the weights of this shift (shifts.h)
  Plan whole{}, sharded{};
};

struct Tensor {
  std::string name;
  std::uint32_t id = 0;
  std::shared_ptr<const van::Group> group;
  std::uint16_t position = 0;   // the position of this rank in the group
  bool is_on_one_host = false;  // all members of the group are, as far as known
  Dtype dtype{};
  std::uint64_t bytes = 0;
  std::string shape;
  tensor::Partitioning whole;     // push_pull, broadcast
  tensor::Partitioning sharded;   // reduce_scatter, all_gather: one shard per member
  tensor::Partitioning fed_back;  // what is remembered of push_pulls: `whole`, in float32
  Plans plans;                    // as it was declared
  static constexpr std::size_t kShifts = 3;
  std::array<std::shared_ptr<const Plans>, kShifts> shifted;  // those since that are in use, for Shifts
  std::atomic<std::uint32_t> next_round{0};
  // With push() and pull() apart, each of them counts its own rounds. This counts those of pull().
  std::atomic<std::uint32_t> next_pull{0};
  std::mutex void_mutex;
  std::vector<std::uint32_t> void_rounds;  // of push() and pull(), of which one has failed: see void_round()
  std::atomic<bool> has_void{false};       // not empty
  std::shared_ptr<Tensor> alone;  // the tensor in the group of this rank alone, for kAccumulate; made at first use
  std::uint32_t stored_by = 0;    // of a tensor alone: the group whose weights it adds to
  std::atomic<std::uint32_t> latest{0};      // of a tensor alone: the round in which the latest addition was sent first
  std::atomic<bool> failed{false};           // the scheduler said that ranks disagree
  std::string why_failed;                    // set before `failed`
  std::shared_ptr<ViewEnd> view_end;         // that of all tensors of the view
  std::shared_ptr<FlightRecorder> recorder;  // that of the job, or null
  std::string compression;                   // as it was declared
  std::unique_ptr<Compressor> compressor;    // null: it was declared without a compression
  std::vector<bool> encoded;                 // the partitions that this rank encodes, where something is remembered
  bool stays_on_host = false;                // it travels as it is, because no network carries it
  Exactness exactness = Exactness::kNone;    // how its sums are rounded
  std::uint64_t ahead = 0;  // partitions under way to each server over a network, on average; 0: no limit
  bool is_timed = false;    // its operations are timed: Counters::operation_times

  Tensor(tensor::Partitioning whole_cut, tensor::Partitioning sharded_cut)
      : whole(whole_cut), sharded(sharded_cut), fed_back(whole_cut) {}
  const tensor::Partitioning& cut(tensor::OperationKind kind) const {
    if (tensor::is_feedback(kind)) return fed_back;
    return tensor::is_sharded(kind) ? sharded : whole;
  }
};

}  // namespace bps::worker
