// SPDX-License-Identifier: Apache-2.0
// Keeps the ranks that are gone, and knows the rounds that cannot complete without them.
//
// A rank that is lost keeps every round of its groups from completing. Where a rank has left as it should, what it has
// pushed before counts, even when its connections have closed since. Belongs to the server loop's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/error.h"
#include "server/round_groups.h"

namespace bps::server {

class GoneRanks {
 public:
  // `groups` must outlive it.
  explicit GoneRanks(const RoundGroups& groups) : groups_(groups) {}

  // `why` is a sentence; the first one about a rank counts.
  void lose(std::uint32_t rank, const std::string& why) {
    const auto [gone, is_first] = ranks_.try_emplace(rank, Gone{why, Departure::kLost});
    if (!is_first && gone->second.state == Departure::kLeft) gone->second.state = Departure::kClosed;
  }
  void leave(std::uint32_t rank, const std::string& why) { ranks_.try_emplace(rank, Gone{why, Departure::kLeft}); }
  // Notes that ranks disagree about the tensor. Ranks that leave for this reason are not the cause of what fails then.
  void disagree(std::uint32_t tensor, const std::string& why) { disagreements_.try_emplace(tensor, why); }
  // Makes this the cause of every failure that follows.
  void end_view(const Error& why) { view_ended_ = why; }

  bool has_view_ended() const { return view_ended_.has_value(); }
  bool is_empty() const { return ranks_.empty(); }
  bool contains(std::uint32_t rank) const { return ranks_.contains(rank); }
  // Returns the error that members are told. A member may hear of the end of the view here before the scheduler tells
  // it.
  Error failure_of(std::uint32_t tensor, const std::string& loss) const {
    if (view_ended_) return *view_ended_;
    const auto found = disagreements_.find(tensor);
    if (found != disagreements_.end()) return {ErrorCode::kMismatch, found->second, kDeclareAlike};
    return {ErrorCode::kPeerLost, loss, kRestartJob};
  }

  // Returns why a round of the group cannot complete, or nullptr if it can. Without `round` it is about a new one.
  const std::string* why_incomplete(const RoundGroup& group, const RoundKey& key, const Round* round,
                                    tensor::OperationKind kind) const;
  // Returns why the group has completed its last round, or all but those whose contributions are here; else nullptr.
  const std::string* why_ended(const RoundGroup& group) const;
  // Returns why nothing more is pushed for a host, all of whose ranks in the group have left; else nullptr. What they
  // pushed on its own before that may still be on its way from their relay.
  const std::string* why_host_left(const RoundGroup& group, std::uint32_t contributor) const;
  // Returns why the contributor cannot be told anything any more, or nullptr if it can.
  const std::string* why_unreachable(const Round& round, std::uint32_t contributor) const;

 private:
  enum class Departure : std::uint8_t {
    kLeft,    // it pushes nothing more, except what it relays for others
    kClosed,  // as kLeft, and it cannot be reached any more
    kLost,
  };
  struct Gone {
    std::string why;
    Departure state;
  };

  bool cannot_contribute(const RoundGroup& group, std::uint32_t rank, Departure state, const RoundKey& key,
                         const Round* round, tensor::OperationKind kind) const;
  bool lacks_speaker(const RoundGroup& group, std::uint32_t rank, const RoundKey& key, const Round* round) const;

  const RoundGroups& groups_;
  std::unordered_map<std::uint32_t, Gone> ranks_;
  std::unordered_map<std::uint32_t, std::string> disagreements_;
  std::optional<Error> view_ended_;
};

}  // namespace bps::server
