// SPDX-License-Identifier: Apache-2.0
#include "tensor/key_map.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace bps::tensor {
namespace {

// Bounds what one declaration can cost the scheduler, in time and memory.
constexpr std::uint64_t kMostRuns = 1U << 16;
// Bounds the places of deal_slots() from below: weights hold up to one part in so many.
constexpr std::size_t kLeastDealt = 1024;
constexpr std::size_t kDealtPerSlot = 32;

constexpr std::array<std::pair<KeyHash, std::string_view>, 7> kNames{{
    {KeyHash::kRaw, "raw"},
    {KeyHash::kDjb2, "djb2"},
    {KeyHash::kNaive, "naive"},
    {KeyHash::kBuiltIn, "built_in"},
    {KeyHash::kSdbm, "sdbm"},
    {KeyHash::kMixed, "mixed"},
    {KeyHash::kBalanced, "balanced"},
}};

// The string hashes read the decimal digits of a key.
class Digits {
 public:
  explicit Digits(std::uint64_t key) : end_(std::to_chars(text_.data(), text_.data() + text_.size(), key).ptr) {}
  const char* begin() const { return text_.data(); }
  const char* end() const { return end_; }

 private:
  std::array<char, 20> text_;  // 2^64 has twenty digits
  const char* end_;
};

// BytePS uses std::hash here, which differs between standard libraries, so that two hosts could disagree. This is
// FNV-1a with 64 bits: the same everywhere, and not BytePS's placement.
std::uint64_t built_in(std::uint64_t key) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char digit : Digits(key)) hash = (hash ^ static_cast<std::uint64_t>(digit)) * 0x100000001b3;
  return hash;
}

// Places a tensor's first partition anywhere, and the next ones on the next servers. The id is multiplied by 2^64 /
// golden ratio (Knuth, The Art of Computer Programming 3, 6.4), so that consecutive ids and ids with a stride, such as
// those of all biases, spread as evenly as random ones.
std::uint64_t raw(std::uint32_t tensor, std::uint64_t partition) {
  return ((tensor * std::uint64_t{0x9e3779b97f4a7c15}) >> 32) + partition;
}

// Servers on workers' hosts share their links with the workers; extra ones do not and take the larger part of keys.
std::uint64_t mixed(const KeyMapConfig& config, std::uint64_t servers, std::uint64_t key) {
  const std::uint64_t workers = config.workers;
  const std::uint64_t bound = std::max<std::uint64_t>(config.mixed_bound, 1);
  const std::uint64_t hash = djb2(key) % bound;
  if (workers == 0 || servers <= workers) return djb2(hash) % servers;
  const std::uint64_t extra = servers - workers;
  double ratio = 0;  // stays 0 with a single worker, where the formula is 0 / 0
  if (workers > 1) {
    ratio =
        static_cast<double>(2 * extra * (workers - 1)) / static_cast<double>(workers * (workers + extra) - 2 * extra);
  }
  if (static_cast<double>(hash) < ratio * static_cast<double>(bound)) return djb2(hash) % extra;
  return extra + djb2(hash) % workers;
}

// Returns a * b < c * d, in 128 bits: bytes of a whole job times a weight do not fit into 64.
bool is_less(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  __extension__ using Wide = unsigned __int128;
  return Wide{a} * b < Wide{c} * d;
}

std::uint64_t hash_of(const KeyMapConfig& config, std::uint32_t tensor, std::uint64_t partition) {
  const std::uint64_t key = make_key(tensor, partition);
  switch (config.hash) {
    case KeyHash::kMixed:
    case KeyHash::kDjb2: return djb2(key);
    case KeyHash::kNaive: return naive(key);
    case KeyHash::kBuiltIn: return built_in(key) * config.built_in_coefficient;
    case KeyHash::kSdbm: return sdbm(key);
    case KeyHash::kRaw:
    case KeyHash::kBalanced: break;  // BalancedPlacement places those of kBalanced
  }
  return raw(tensor, partition);
}

}  // namespace

std::uint64_t djb2(std::uint64_t key) {
  std::uint64_t hash = 5381;
  for (const char digit : Digits(key)) hash = hash * 33 + static_cast<std::uint64_t>(digit);
  return hash;
}

std::uint64_t sdbm(std::uint64_t key) {
  std::uint64_t hash = 0;
  for (const char digit : Digits(key)) hash = static_cast<std::uint64_t>(digit) + (hash << 6) + (hash << 16) - hash;
  return hash;
}

std::uint64_t naive(std::uint64_t key) {
  return ((key >> 16) + key % 65536) * 9973;
}

KeyHash parse_key_hash(std::string_view name) {
  std::string names;
  for (const auto& [hash, known] : kNames) {
    if (known == name) return hash;
    names.append(names.empty() ? "" : ", ").append(known);
  }
  throw Error(ErrorCode::kInvalidArgument, "no key hash is called '" + std::string(name) + "'", "use one of " + names);
}

std::string_view to_string(KeyHash hash) {
  for (const auto& [known, name] : kNames) {
    if (known == hash) return name;
  }
  return "unknown";
}

// Deals by Webster's method: the next place belongs to the slot for which half a place more would not yet be too much.
std::vector<std::uint32_t> deal_slots(std::span<const std::uint32_t> weights) {
  if (std::ranges::adjacent_find(weights, std::not_equal_to()) == weights.end()) return {};
  struct Slot {
    std::uint32_t index;
    std::uint64_t weight;
    std::uint64_t halves = 1;  // 2 taken places + 1
  };
  const auto comes_later = [](const Slot& a, const Slot& b) {  // compares halves / weight, without a division
    const std::uint64_t mine = a.halves * b.weight, other = b.halves * a.weight;
    return mine != other ? mine > other : a.index > b.index;
  };
  std::priority_queue<Slot, std::vector<Slot>, decltype(comes_later)> next(comes_later);
  for (std::uint32_t i = 0; i < weights.size(); ++i) {
    if (weights[i] > 0) next.push({i, weights[i]});
  }
  std::vector<std::uint32_t> deal(std::max(kLeastDealt, weights.size() * kDealtPerSlot));
  for (std::uint32_t& dealt : deal) {
    Slot slot = next.top();
    next.pop();
    dealt = slot.index;
    slot.halves += 2;
    next.push(slot);
  }
  return deal;
}

std::uint32_t slot_of(const KeyMapConfig& config, std::uint32_t tensor, std::uint64_t partition) {
  const std::uint64_t slots = config.slots.empty() ? config.servers : config.slots.size();
  if (slots <= 1) return 0;
  const bool is_mixed = config.hash == KeyHash::kMixed;
  if (!config.deal.empty() && !is_mixed) return config.deal[hash_of(config, tensor, partition) % config.deal.size()];
  return static_cast<std::uint32_t>(is_mixed ? mixed(config, slots, make_key(tensor, partition))
                                             : hash_of(config, tensor, partition) % slots);
}

std::uint32_t owner_of(const KeyMapConfig& config, std::uint32_t slot, std::uint32_t tensor, std::uint64_t partition) {
  if (config.slots.empty()) return slot;
  if (config.slots[slot] != kNoServer) return config.slots[slot];
  std::vector<std::uint32_t> left = config.slots;
  std::uint64_t digits = hash_of(config, tensor, partition);
  for (std::size_t choice = slot; left.size() > 1; choice = digits % left.size()) {
    if (left[choice] != kNoServer) return left[choice];
    digits /= left.size();
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(choice));
  }
  return left.front();  // one is left, as a view has a server
}

std::uint32_t server_of(const KeyMapConfig& config, std::uint32_t tensor, std::uint64_t partition) {
  return owner_of(config, slot_of(config, tensor, partition), tensor, partition);
}

BalancedPlacement::BalancedPlacement(std::span<std::uint64_t> load, const Partitioning& cut,
                                     std::span<const std::uint32_t> weights)
    : run_(cut.count() / kMostRuns + 1), slots_((cut.count() + run_ - 1) / run_, 0) {
  if (load.empty()) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const std::uint64_t first = i * run_;
    const Partitioning::Piece last = cut.piece(std::min(first + run_, cut.count()) - 1);
    const std::uint64_t bytes = last.offset + last.length - cut.piece(first).offset;
    const auto weight = [&](std::size_t slot) { return std::uint64_t{weights.empty() ? 1 : weights[slot]}; };
    std::size_t least = load.size();  // ends as the first of equals
    for (std::size_t slot = 0; slot < load.size(); ++slot) {
      if (weight(slot) == 0) continue;
      if (least == load.size() || is_less(load[slot] + bytes, weight(least), load[least] + bytes, weight(slot))) {
        least = slot;
      }
    }
    if (least == load.size()) least = 0;
    load[least] += bytes;
    slots_[i] = static_cast<std::uint32_t>(least);
  }
}

}  // namespace bps::tensor
