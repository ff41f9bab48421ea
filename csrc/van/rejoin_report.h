// SPDX-License-Identifier: Apache-2.0
// Gathers what a node has to tell a scheduler in the place of a lost one. Belongs to the van's thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "van/messages.h"

namespace bps::van {

class RejoinReport {
 public:
  // Notes the number of the job's run, which the welcome has told.
  void begin(std::uint64_t run) { run_ = run; }
  // Notes that a barrier of this group has ended.
  void note_barrier(std::uint32_t group) { ++barriers_[group]; }
  // Notes that new_group() has made this group here.
  void note_group(std::uint32_t group, const NewGroup& request);
  // Notes that a node has left the job; the text says so.
  void note_left(std::uint32_t node, const std::string& text);
  const std::string& last_left() const { return last_left_; }
  // Notes that this node leaves the job. The next scheduler is told that as well.
  void note_leaving(const Leave& leave) { leaving_ = leave; }
  const std::optional<Leave>& leaving() const { return leaving_; }

  // `requests` are those of the calls that have no answer.
  Rejoin make(std::uint32_t self, const Membership& membership, const std::vector<Message>& requests) const;

 private:
  std::uint64_t run_ = 0;
  std::map<std::uint32_t, std::uint64_t> barriers_;  // how many have ended, by group
  std::vector<Rejoin::Made> groups_;
  std::vector<std::uint32_t> left_;
  std::string last_left_;
  std::optional<Leave> leaving_;
};

}  // namespace bps::van
