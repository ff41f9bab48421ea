// SPDX-License-Identifier: Apache-2.0
// Keeps the groups that a server loop knows, and tells who speaks for whom in them.
//
// A rank speaks for itself; for the ranks of a host in the rounds of the network it is their relay. The group of a rank
// alone (tensor::kAlone) is made when that rank first uses it, so there are no more of them than ranks. References to
// groups stay valid. Belongs to the server loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "server/round.h"
#include "server/worker_session.h"
#include "tensor/push_header.h"

namespace bps::server {

class RoundGroups {
 public:
  // All of these must outlive it.
  RoundGroups(const van::Hosts& hosts, const Location& here, const Sessions& sessions)
      : hosts_(hosts), here_(here), sessions_(sessions) {}

  void add(const van::Group& group) { groups_.emplace(group.id, std::make_unique<RoundGroup>(group, hosts_, here_)); }
  // Returns the group that a rank has named, or nullptr.
  const RoundGroup* find(std::uint32_t id, std::uint32_t sender_rank) {
    if (latest_ != nullptr && latest_->group.id == id) return latest_;
    const auto found = groups_.find(id);
    if (found == groups_.end()) return id == (tensor::kAlone | sender_rank) ? add_alone(sender_rank) : nullptr;
    return latest_ = found->second.get();
  }
  const van::Hosts& hosts() const { return hosts_; }

  // Returns the contributor that a rank speaks for, or Contributors::kNone.
  std::uint32_t contributor_of(const RoundGroup& group, std::uint32_t rank, bool for_host) const;
  std::uint32_t speaker_of(const RoundGroup& group, const RoundKey& key, std::uint32_t contributor) const;
  std::uint32_t speaker_of(const Round& round, std::uint32_t contributor) const {
    return speaker_of(*round.group, round.key, contributor);
  }
  // Returns the session of that rank's loop, or nullptr.
  WorkerSession* session_of(const Round& round, std::uint32_t contributor) const {
    return find_session(sessions_, speaker_of(round, contributor), round.peers.worker_loop);
  }

 private:
  const RoundGroup* add_alone(std::uint32_t rank);

  const van::Hosts& hosts_;
  const Location here_;
  const Sessions& sessions_;
  std::unordered_map<std::uint32_t, std::unique_ptr<RoundGroup>> groups_;
  const RoundGroup* latest_ = nullptr;  // most pushes belong to the same one as the push before
};

}  // namespace bps::server
