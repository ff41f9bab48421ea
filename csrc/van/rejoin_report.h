// SPDX-License-Identifier: Apache-2.0
// Gathers what a node has to tell a scheduler in the place of a lost one. Threading: the van's.
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
  // At the welcome: the number of the job's run.
  void begin(std::uint64_t run) { run_ = run; }
  // A barrier of this group has ended.
  void note_barrier(std::uint32_t group) { ++barriers_[group]; }
  // new_group() has returned this here.
  void note_group(std::uint32_t group, const NewGroup& request);
  // A node has left the job; the text says so.
  void note_left(std::uint32_t node, const std::string& text);
  const std::string& last_left() const { return last_left_; }
  // This node leaves the job, which the next scheduler is told as well.
  void note_leaving(const Leave& leave) { leaving_ = leave; }
  const std::optional<Leave>& leaving() const { return leaving_; }

  // `requests`: of the calls that have no answer.
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
