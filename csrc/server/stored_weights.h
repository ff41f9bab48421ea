// SPDX-License-Identifier: Apache-2.0
// Keeps the weights that this server loop has between rounds: see stored_partition.h.
//
// A round of kStore with a root replaces them; one whose root is nobody gives them back. An addition
// is a round of a rank alone. It is answered with what is there then, unless the rank is too far ahead. In that case it
// is held until the others have caught up. Belongs to the server loop's thread.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "server/memory_shares.h"
#include "server/round_sums.h"
#include "server/stored_partition.h"

namespace bps::server {

class StoredWeights {
 public:
  // All of these must outlive it.
  StoredWeights(RoundTable& table, RoundEnds& ends, RoundSums& sums, MemoryShares& shares, const GoneRanks& gone)
      : table_(table), ends_(ends), sums_(sums), shares_(shares), gone_(gone) {}

  // Plans room for the result of a round that everybody takes part in. What was kept before stays until the round is
  // complete. Returns false where there is no room, and the round has failed.
  bool plan_store(Round& round);
  // Keeps what the pass has written there. Returns false where the round has failed.
  bool store(Round& round);
  // Gives everybody what the server keeps, and keeps it no more.
  void give_back(Round& round);
  // Adds what a rank has sent, and answers or holds the round.
  void accumulate(Round& round);
  // Answers the rounds that have been held long enough, after ranks are gone.
  void release_held();
  // Returns the ranks that a held round waits for.
  std::vector<std::uint32_t> ranks_behind(const Round& round) const;

 private:
  enum class Release : std::uint8_t { kThoseInTime, kAll };

  StoredPartition* find(const RoundKey& key);
  void release_held(StoredPartition& stored, Release which);
  void forget(StoredPartition& stored);
  bool may_go_on(const StoredPartition& stored, std::uint64_t count, std::uint32_t most_ahead) const;
  void answer(Round& round) { ends_.answer_all(round, RoundSums::result_of(round)); }

  RoundTable& table_;
  RoundEnds& ends_;
  RoundSums& sums_;
  MemoryShares& shares_;
  const GoneRanks& gone_;
  std::unordered_map<RoundKey, StoredPartition, RoundKeyHash> partitions_;
  StoredPartition storing_;  // what the pass in progress writes
};

}  // namespace bps::server
