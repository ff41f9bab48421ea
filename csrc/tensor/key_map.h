// Which server sums a partition: [2] of the walk. Pure functions; every worker computes the same answer.
//
// The formulas and their golden vectors are BytePS's (BYTEPS_KEY_HASH_FN); `raw` also folds the tensor's id into the
// low bits, because (id << 16) is 0 modulo every power of two and would send each single-partition tensor to server 0.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace bps::tensor {

enum class KeyHash : std::uint8_t { kRaw, kDjb2, kNaive, kBuiltIn, kSdbm, kMixed, kBalanced };

// The 64-bit key of BytePS: (tensor id << 16) + partition.
constexpr std::uint64_t make_key(std::uint32_t tensor, std::uint64_t partition) {
  return (std::uint64_t{tensor} << 16) + partition;
}

std::uint64_t djb2(std::uint64_t key);
std::uint64_t sdbm(std::uint64_t key);
std::uint64_t naive(std::uint64_t key);

struct KeyMapConfig {
  KeyHash hash = KeyHash::kRaw;
  std::uint32_t servers = 1;
  std::uint32_t workers = 1;               // mixed: co-located servers come after the extra ones
  std::uint64_t built_in_coefficient = 1;  // BYTEPS_BUILT_IN_HASH_COEF
  std::uint64_t mixed_bound = 101;         // BYTEPS_MIXED_MODE_BOUND
};

KeyHash parse_key_hash(std::string_view name);  // throws Error(kInvalidArgument) that lists the names
std::string_view to_string(KeyHash hash);

// Server of one partition, for every hash but kBalanced.
std::uint32_t server_of(const KeyMapConfig& config, std::uint32_t tensor, std::uint64_t partition);

// kBalanced: places whole tensors' partitions so that bytes per server are even. Deterministic: the result depends only
// on `load` (bytes already placed on each server, updated here) and the pieces, heaviest first by the caller's order.
// Since all ranks must agree, the scheduler places and tells the workers: first-declared, first-placed.
std::uint32_t least_loaded(std::span<std::uint64_t> load, std::uint64_t bytes);

}  // namespace bps::tensor
