// SPDX-License-Identifier: Apache-2.0
// Keeps what servers sum in proportion to what the links of their hosts carry. It watches the links, and gives the
// servers other weights when a link has become slow, or is as fast as before. Belongs to the scheduler's thread.
#pragma once

#include <vector>

#include "core/json.h"
#include "van/link_watch.h"
#include "van/shift.h"

namespace bps::van {

class LinkFollower {
 public:
  LinkFollower(MemberTable& members, Shift::Tell tell, Shift::GroupOf group_of)
      : members_(members),
        group_of_(std::move(group_of)),
        shift_(members, std::move(tell)),
        watch_(members.membership()) {}

  // Take what a member tells. They return false where no honest member says this.
  bool take(const Member& member, const LinkUse& use) { return watch_.take(member.node->id, use); }
  bool take(const Member& member, Rounds&& rounds);
  // To be called a few times a second.
  void look(Clock::time_point now);
  // Gives the servers the weights that follow from these links, if that is possible just now. `links` has bytes per
  // second for each node.
  void shift(std::vector<std::uint64_t> links, Clock::time_point now);
  // Calls off the shift that is open. To be called when a member has left or is lost.
  void call_off() { shift_.call_off(); }
  // Adds how many shifts there were, and the links that are slow.
  void describe(JsonObject& state) const;

 private:
  void note_shift();

  MemberTable& members_;
  const Shift::GroupOf group_of_;
  Shift shift_;
  LinkWatch watch_;
  Clock::time_point looked_{};
  Clock::time_point shifted_{};
};

}  // namespace bps::van
