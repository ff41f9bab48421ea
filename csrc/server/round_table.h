// SPDX-License-Identifier: Apache-2.0
// Keeps the open rounds of a server loop, and which rounds of each key are over.
//
// A key remembers its rounds that are over, so that a late or repeated push is recognised. Rounds of one key may end in
// any order, and many may be missing, because other servers sum them while they have the key (van/shift.h). Each key
// has one small entry, which is never freed, with a word for each run of rounds behind a gap. Each open round has one
// Round, which is reused. All are bounded for each worker session that opens them. Belongs to the server loop's thread,
// but for recorder().
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "core/clock.h"
#include "server/round.h"
#include "server/round_recorder.h"

namespace bps::server {

// Knows the rounds of one key. Their order is that of serial numbers, which wrap in a very long job.
struct KeyRounds {
  struct Run {
    std::uint32_t first, end;
  };
  std::uint32_t all_over_below = 0;  // all rounds before this one are over, or will not come
  std::vector<Run> over;             // rounds behind it that are over, in order, with gaps between two runs
  Round* open = nullptr;
  TableShare* opener = nullptr;

  bool is_over(std::uint32_t number) const;
  void end(std::uint32_t number);
};

class RoundTable {
 public:
  // These are far beyond what a worker can wait for or declare. A million partitions of the default size are 512 GiB
  // under way between two loops, and 512 MiB hold four million keys.
  struct Limits {
    std::uint64_t rounds = 1 << 20;
    std::uint64_t words = 1 << 26;
  };
  explicit RoundTable(const Limits& limits) : limits_(limits) {}

  enum class Found : std::uint8_t { kOpen, kNew, kOver, kTooMany };
  struct Lookup {
    Found found;
    Round* round;  // set for kOpen and kNew
  };

  // A new round, and a new key, count as the share of `opener`, which must outlive the table.
  Lookup find_or_open(const RoundKey& key, std::uint32_t number, const RoundGroup& group, TableShare& opener);
  Round* find(const RoundKey& key, std::uint32_t number);
  bool is_over(const RoundKey& key, std::uint32_t number) const;
  Round& by_token(std::uint32_t token) { return rounds_[token]; }
  // Closes a round that is over. Its entry will serve another one.
  void close(Round* round, std::uint64_t now = coarse_now_ns());

  const std::vector<Round*>& open() const { return open_; }
  std::size_t keys() const { return keys_.size(); }
  // Returns the last rounds that are over. Any thread may read them.
  const RoundRecorder& recorder() const { return recorder_; }

 private:
  // An entry of the hash table has so many words, with what the allocator and the table add to it.
  static constexpr std::uint64_t kWordsOfKey = 16;

  const Limits limits_;
  std::unordered_map<RoundKey, KeyRounds, RoundKeyHash> keys_;
  std::deque<Round> rounds_;
  std::vector<Round*> free_;
  std::vector<Round*> open_;
  RoundRecorder recorder_;
};

}  // namespace bps::server
