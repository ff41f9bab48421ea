// SPDX-License-Identifier: Apache-2.0
// Finds the server that sums a partition, by pure functions: every worker computes the same answer.
//
// A hash gives each partition a key slot. At first each server has one. The key slot of a lost server is empty, until
// another server takes it. Each key has an order of preference of all key slots, and the first of them that has a
// server sums it. So only the keys of a lost server move, and only they move back, with every hash. Rendezvous hashing
// promises that, too, but here the order follows the digits of the key's hash, to the bases n, n - 1, n - 2, ...: the
// first digit is the hash modulo the number of servers, as in BytePS. And where consecutive pieces of a tensor go to
// consecutive servers, they are spread as evenly over the servers that are left.
//
// The formulas and their golden vectors are BytePS's (BYTEPS_KEY_HASH_FN); `raw` also folds the tensor's id into the
// low bits, because (id << 16) is 0 modulo every power of two and would send each single-partition tensor to server 0.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/partition.h"

namespace bps::tensor {

inline constexpr std::uint32_t kNoServer = ~std::uint32_t{0};

enum class KeyHash : std::uint8_t { kRaw, kDjb2, kNaive, kBuiltIn, kSdbm, kMixed, kBalanced };

// Makes the 64-bit key of BytePS: (tensor id << 16) + partition.
constexpr std::uint64_t make_key(std::uint32_t tensor, std::uint64_t partition) {
  return (std::uint64_t{tensor} << 16) + partition;
}

// Returns 32 bits that are as good as random. They spread partitions over loops and relays, independently of the choice
// of the server.
constexpr std::uint32_t spread_of(std::uint32_t tensor, std::uint32_t partition) {
  return static_cast<std::uint32_t>((make_key(tensor, partition) * 0x9e3779b97f4a7c15) >> 32);
}
// Returns the bits that choose a relay. The low ones choose loops.
constexpr std::uint32_t relay_hash(std::uint32_t spread) {
  return spread >> 16;
}

std::uint64_t djb2(std::uint64_t key);
std::uint64_t sdbm(std::uint64_t key);
std::uint64_t naive(std::uint64_t key);

struct KeyMapConfig {
  KeyHash hash = KeyHash::kRaw;
  std::uint32_t servers = 1;               // how many there are at present
  std::vector<std::uint32_t> slots{};      // by key slot: its server, or kNoServer; empty: number i belongs to server i
  std::vector<std::uint32_t> weights{};    // by key slot; empty: all equal
  std::vector<std::uint32_t> deal{};       // key slots as deal_slots() deals them; empty: each in turn
  std::uint32_t workers = 1;               // hash kMixed: co-located servers come after the extra ones
  std::uint64_t built_in_coefficient = 1;  // BYTEPS_BUILT_IN_HASH_COEF
  std::uint64_t mixed_bound = 101;         // BYTEPS_MIXED_MODE_BOUND
};

// Returns a sequence in which each key slot stands as often as its weight says, at even distances: any run of it has
// each slot's share, give or take one. Hashes choose places in it, modulo its length. The pieces of a tensor take
// consecutive ones. It is empty where all weights are equal, or all zero: then each key slot comes in turn.
std::vector<std::uint32_t> deal_slots(std::span<const std::uint32_t> weights);

KeyHash parse_key_hash(std::string_view name);  // throws Error(kInvalidArgument) that lists the names
std::string_view to_string(KeyHash hash);

// These return the key slot and the server of one partition, for every hash but kBalanced.
std::uint32_t slot_of(const KeyMapConfig& config, std::uint32_t tensor, std::uint64_t partition);
std::uint32_t server_of(const KeyMapConfig& config, std::uint32_t tensor, std::uint64_t partition);
// Returns the server that sums this partition of a key slot: the slot's own, or another one while it has none.
std::uint32_t owner_of(const KeyMapConfig& config, std::uint32_t slot, std::uint32_t tensor, std::uint64_t partition);

// Places a tensor by kBalanced: each piece goes to the key slot that has done with it first, at speeds as the weights
// say. The result depends only on the load and the cut. So the scheduler, which accounts for tensors in the order of
// their first declaration, and every worker, which starts from the load that the scheduler told it, compute the same.
class BalancedPlacement {
 public:
  // `load` is how many bytes are placed on each key slot; the bytes of this tensor are added. An empty load stands for
  // one server. `weights` are by key slot, as for deal_slots(); empty: all are equal.
  BalancedPlacement(std::span<std::uint64_t> load, const Partitioning& cut,
                    std::span<const std::uint32_t> weights = {});
  std::uint32_t slot(std::uint64_t piece) const { return slots_[piece / run_]; }

 private:
  std::uint64_t run_;  // how many consecutive pieces are placed together: several for tensors of very many pieces
  std::vector<std::uint32_t> slots_;
};

}  // namespace bps::tensor
