// SPDX-License-Identifier: Apache-2.0
// Describes who takes part in a job. The scheduler decides that when all have joined, and tells everybody.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "compress/label.h"
#include "core/bytes.h"
#include "core/dtype.h"
#include "van/terms.h"

namespace bps::van {

inline constexpr std::int32_t kNoRank = -1;
inline constexpr std::int32_t kAnyRank = -2;  // a wish at joining time only

// These limit the nodes of a job, and the texts that a message may carry.
inline constexpr std::size_t kMostNodes = 1U << 16;
inline constexpr std::size_t kMostTransportBytes = 16;
inline constexpr std::size_t kMostAddressBytes = 65536;
inline constexpr std::size_t kMostHostBytes = 256;
inline constexpr std::size_t kMostNameBytes = 4096;
inline constexpr std::size_t kMostShapeBytes = 1024;
inline constexpr std::uint64_t kMostElements = 1ULL << 48;  // times eight bytes is still far from overflow

// An address leads to a node by one transport; its bytes mean something to that transport only.
struct TransportAddress {
  std::string transport;  // "shm", "tcp", "rdma"
  Bytes address;
  static constexpr void fields(auto& io, auto& m) {
    io.bounded(m.transport, kMostTransportBytes);
    io.bounded(m.address, kMostAddressBytes);
  }
  bool operator==(const TransportAddress&) const = default;
};

// Describes one process. A joint process is a worker and a server; the scheduler is not a node.
struct Node {
  std::uint32_t id = 0;  // its place in Membership::nodes plus one; 0 = the scheduler
  std::int32_t worker_rank = kNoRank;
  std::int32_t server_rank = kNoRank;
  std::uint16_t worker_loops = 0;
  std::uint16_t server_loops = 0;
  std::uint32_t pid = 0;
  std::string host;            // for people
  std::string host_key;        // equal for processes that can share memory
  std::uint64_t identity = 0;  // random, of this process alone; the same in all views
  bool sums_on_host = false;   // BPS_HOST_SUM, and shared memory is allowed: see hosts.h
  bool may_serve = false;      // a worker that can be a server, too, if that helps the dedicated ones
  std::uint64_t link = 0;      // bytes per second of its host's link; 0: unknown
  std::uint64_t sum_rate = 0;  // bytes of pushes per second that its server can add; 0: unknown
  bool has_state = false;      // it was in the view before, or has suspended the job
  Terms terms{};
  std::vector<TransportAddress> addresses;

  // Returns true when the process may run server loops, to sum for all or for its host.
  bool sums() const { return server_rank >= 0 || sums_on_host; }
  // A worker or a server without a loop could do nothing. The most is limited because each process has tables of all
  // loops.
  static constexpr std::uint16_t kMostLoops = 64;  // as the settings allow
  bool has_loops() const {
    return (worker_rank == kNoRank || worker_loops > 0) &&
           ((server_rank == kNoRank && !may_serve) || server_loops > 0) && worker_loops <= kMostLoops &&
           server_loops <= kMostLoops;
  }
  // Returns how errors name a peer: "worker 1 and server 1 (host, pid 42)".
  std::string describe() const;
  static constexpr void fields(auto& io, auto& m) {
    io(m.id, m.worker_rank, m.server_rank, m.worker_loops, m.server_loops, m.pid);
    io.bounded(m.host, kMostHostBytes);
    io.bounded(m.host_key, kMostHostBytes);
    io(m.identity, m.sums_on_host, m.may_serve, m.link, m.sum_rate, m.has_state, m.terms, m.addresses);
    io.require([&] { return m.worker_rank >= kAnyRank && m.server_rank >= kAnyRank; });
  }
  bool operator==(const Node&) const = default;
};

// Names an ordered set of worker ranks that sum together. Group 0 is all workers.
struct Group {
  std::uint32_t id = 0;
  std::vector<std::uint32_t> ranks;  // ascending, worker ranks
  std::uint32_t size() const { return static_cast<std::uint32_t>(ranks.size()); }
  // Returns the position of a worker rank in the group, or kNoRank.
  std::int32_t index_of(std::uint32_t worker_rank) const;
  static constexpr void fields(auto& io, auto& m) {
    io(m.id, m.ranks);
    io.require(
        [&] { return !m.ranks.empty() && std::ranges::adjacent_find(m.ranks, std::greater_equal()) == m.ranks.end(); });
  }
  bool operator==(const Group&) const = default;
};

struct Roll;

struct Membership {
  std::vector<Node> nodes;  // workers by rank first, then servers that are no workers
  std::uint32_t workers = 0;
  std::uint32_t servers = 0;
  std::uint32_t epoch = 1;  // the number of this view; what members send in another epoch is dropped
  // Keys belong to key slots. There are as many as the first view had servers, and more when more enter. Each slot is
  // named by the identity of the server that has it, or that had it until it was lost; a server that enters takes the
  // first slot of a lost one. Where the list is empty, slot i belongs to server i.
  std::vector<std::uint64_t> slots{};

  // These return nullptr for a rank, an id or an identity that does not exist.
  const Node* worker(std::uint32_t rank) const;
  const Node* server(std::uint32_t rank) const;
  const Node* by_id(std::uint32_t id) const;
  const Node* find(std::uint64_t identity) const;
  // Returns "server 3", or "worker 1" for a node that is no server. Such names stay the same when a process is started
  // again.
  std::string name_of(std::uint32_t id) const;
  Group all() const;
  // Returns true when each worker is a server, too.
  bool has_embedded_servers() const { return workers > 0 && nodes.front().server_rank >= 0; }
  // Returns the rank of each key slot's server, or tensor::kNoServer.
  std::vector<std::uint32_t> server_of_slot() const;
  // Deals key slots to the servers of this view. `before` has those of the view before, or none for the first view.
  void take_slots(std::vector<std::uint64_t> before);
  // Returns how many loops all servers have together. A key slot without a server counts as many as the others do on
  // average, so that tensors are cut as they were.
  std::uint32_t all_server_loops() const;
  // Returns true when some workers have entered a job of which others have state.
  bool has_entrants() const;
  // Returns true when each rank is there once, and ids and order are as promised above. This holds for each membership
  // that comes off the wire.
  bool is_consistent() const;
  using Packed = Roll;  // how it travels
  Roll pack() const;
  bool unpack(const Roll& roll);  // returns false where no consistent membership is packed so
  bool operator==(const Membership&) const = default;
};

// Describes a tensor as a rank declares it when it first uses the name. All ranks of the group must declare the same.
struct TensorSpec {
  std::uint32_t group = 0;
  std::string name;
  std::uint8_t dtype = 0;
  std::uint64_t count = 0;    // elements
  std::string shape;          // for people: "(3, 4)"
  std::string compression{};  // as compress/compression.h says, or empty
  static constexpr void fields(auto& io, auto& m) {
    io(m.group);
    io.bounded(m.name, kMostNameBytes);
    io(m.dtype, m.count);
    io.bounded(m.shape, kMostShapeBytes);
    io.bounded(m.compression, compress::kMostText);
    io.require([&] { return size_of(Dtype{m.dtype}) != 0 && m.count <= kMostElements; });
  }
  bool operator==(const TensorSpec&) const = default;
};

struct TensorId {
  std::uint32_t id = 0;                    // below 2^30, unique in the job, made from the name
  std::vector<std::uint64_t> server_load;  // bytes on each server before this tensor was placed (key hash `balanced`)
  static constexpr void fields(auto& io, auto& m) {
    io(m.id, m.server_load);
    io.require([&] { return m.id != 0 && m.id < (1U << 30); });
  }
  bool operator==(const TensorId&) const = default;
};

// Returns how texts name ranks: "rank 3" or "ranks 0, 1, 3". A long list is cut short.
std::string name_ranks(std::span<const std::uint32_t> ranks);

}  // namespace bps::van
