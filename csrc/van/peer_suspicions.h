// SPDX-License-Identifier: Apache-2.0
// Keeps the peers whose connections broke, until it is known what became of them, and the peers that are lost. Belongs
// to the van's thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace bps::van {

class PeerSuspicions {
 public:
  // Notes why the connection to a node broke. Only the first reason counts.
  void add(std::uint32_t node, const std::string& why) { suspected_.emplace(node, why); }
  // Returns why a node is suspected, or nothing.
  std::optional<std::string> why(std::uint32_t node) const {
    const auto found = suspected_.find(node);
    return found == suspected_.end() ? std::nullopt : std::optional(found->second);
  }
  // Returns a node that is suspected, or nothing.
  std::optional<std::uint32_t> any() const {
    return suspected_.empty() ? std::nullopt : std::optional(suspected_.begin()->first);
  }
  // Notes that a node is lost. Returns false where that was known before.
  bool note_lost(std::uint32_t node) {
    suspected_.erase(node);
    return lost_.insert(node).second;
  }
  bool is_lost(std::uint32_t node) const { return lost_.contains(node); }

 private:
  std::map<std::uint32_t, std::string> suspected_;
  std::set<std::uint32_t> lost_;
};

}  // namespace bps::van
