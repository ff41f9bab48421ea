// SPDX-License-Identifier: Apache-2.0
// Numbers the places that a worker loop can send to, and decides which of them each partition of a tensor takes.
//
// Places are the loops of all servers, in order, then the relays of this host, unless those are the servers of its
// processes. A relay's loop has the index of the worker loop that sends to it. Any thread may call the functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tensor/key_map.h"
#include "van/hosts.h"
#include "van/server_places.h"
#include "van/server_weights.h"
#include "worker/tensor.h"

namespace bps::worker {

// Says how many bytes of tensors each server sums, by its rank, and how many it would sum by the weights of their
// groups.
struct Deal {
  std::vector<std::uint64_t> bytes;
  std::vector<double> due;

  std::uint64_t all() const;
  std::uint64_t beyond() const;  // the bytes beyond what is due, of servers that sum more
};

class Places {
 public:
  // `weights` say how much each server sums for a group; without them all take turns. `own_server` has the server rank
  // of each worker rank's own process, or is empty. `rank` is that of this worker.
  Places(tensor::KeyMapConfig key_map, van::ServerPlaces servers, std::optional<van::ServerWeights> weights,
         std::vector<std::uint32_t> own_server, van::Hosts hosts, std::uint32_t rank)
      : key_map_(std::move(key_map)),
        servers_(std::move(servers)),
        weights_(std::move(weights)),
        own_server_(std::move(own_server)),
        hosts_(std::move(hosts)),
        rank_(rank) {}

  // Returns the places where servers have other weights.
  std::shared_ptr<const Places> with(van::ServerWeights weights) const {
    return std::make_shared<const Places>(key_map_, servers_, std::move(weights), own_server_, hosts_, rank_);
  }

  std::size_t count() const;
  // Returns how many entries the load has that the scheduler tells with a tensor.
  std::size_t slots() const;
  // Returns the places that a worker loop needs, for its operations on all ranks and as a relay.
  std::vector<std::size_t> needed(std::size_t worker_loop, std::size_t worker_loops, const van::Group& all) const;
  // Returns the partitions of a tensor by worker loop and place. With `own_shards` a shard is summed where it is
  // wanted.
  Plan plan(const Tensor& tensor, const tensor::Partitioning& cut, bool own_shards, std::span<const std::uint64_t> load,
            std::size_t worker_loops) const;
  // Returns true when this rank is the relay at a place to which its loop sends parts for the host.
  bool is_own_relay(std::size_t place, std::size_t worker_loop) const { return place == of_relay(rank_, worker_loop); }
  // Returns the server that sums each partition of the tensor as a whole.
  std::vector<std::uint32_t> servers_of(const Tensor& tensor) const;
  // Returns the same in bytes, for all these tensors together.
  Deal deal(std::span<const std::shared_ptr<Tensor>> tensors) const;

 private:
  static std::vector<std::uint32_t> order_of(const tensor::Partitioning& cut, bool by_shard);
  static bool meets(std::size_t worker_loop, std::size_t worker_loops, std::size_t shard, std::size_t shards);
  std::size_t of_relay(std::uint32_t worker_rank, std::size_t worker_loop) const;
  bool needs_relay(const van::Group& group, std::uint32_t server) const;

  const tensor::KeyMapConfig& key_map_of(const van::Group& group) const;

  const tensor::KeyMapConfig key_map_;
  const van::ServerPlaces servers_;
  const std::optional<van::ServerWeights> weights_;
  const std::vector<std::uint32_t> own_server_;
  const van::Hosts hosts_;
  const std::uint32_t rank_;
  mutable std::mutex mutex_;
  mutable std::map<std::uint32_t, tensor::KeyMapConfig> key_maps_;  // by group, where servers have weights
};

}  // namespace bps::worker
