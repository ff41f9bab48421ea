// SPDX-License-Identifier: Apache-2.0
// Finds the hosts whose links carry less than the weights of servers count on, or as much as they should again, from
// what members tell of their connections (LinkUse).
//
// A link is slow when the connections of its host have bytes on their way much longer than those between other hosts. A
// rank that is late does not make a link slow, because nothing of it is on its way. What a slow link carries is
// measured while it is busy. A link is slow only if it also carries less than others do of what they should, and two
// looks in a row must agree.
//
// A trial finds out whether a slow link is faster again: the link gets twice as much to do, after a pause. The pause
// doubles each time that the trial fails. When the link carries much more than it is counted on for, it is tried at
// once, or after a quarter of the pause where a trial has failed: a link that limits what is sent by a bucket of tokens
// seems fast when it has little to do.
//
// Belongs to the scheduler's thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "van/messages.h"

namespace bps::van {

class LinkWatch {
 public:
  explicit LinkWatch(const Membership& members);

  // Returns false where no honest member says this.
  bool take(std::uint32_t node, const LinkUse& use);
  // To be called about once a second. Returns the links that weights should follow from now on, in bytes per second and
  // one for each node, or nothing where they stay as they are. `may_change` is false while it is too early for a
  // change.
  std::optional<std::vector<std::uint64_t>> look(bool may_change);
  // Takes the links that weights follow from now on.
  void adopt(const std::vector<std::uint64_t>& links);

  struct Slow {
    std::string host;
    double is, was;  // bytes per second
  };
  std::vector<Slow> slow() const;

 private:
  struct Host {
    enum class State : std::uint8_t { kGood, kSlow, kTried };  // kTried: it is slow, and gets more for a trial

    std::string name;
    double nominal = 0;  // bytes per second of its link, as it joined; 0: unknown
    double used = 0;     // bytes per second that weights count on; 0: as nominal
    State state = State::kGood;
    // These count the looks in a row that found the link slower than that, much faster, and not slower.
    int slower = 0, faster = 0, calm = 0;
    int pause = 0;  // how many calm looks pass before the next trial
  };
  struct Flow {  // what one node has sent to another one lately
    double bytes = 0, busy_us = 0;
  };
  struct Window;  // what has happened between two looks

  Window window();
  // Returns the bytes per second that weights should count on, or nothing where that stays. `ratio` says how much
  // longer the flows of the host are busy than those of others, and `rate` what its link carries, in bytes per second.
  std::optional<double> judge(Host& host, double ratio, double rate, bool may_change);
  double nominal(const Host& host) const { return host.nominal > 0 ? host.nominal : usual_; }
  double used(const Host& host) const { return host.used > 0 ? host.used : nominal(host); }

  std::vector<std::size_t> host_of_;  // by node - 1
  std::vector<Host> hosts_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Flow> flows_;  // by the sending and the receiving node
  double usual_ = 0;  // bytes per second of links whose speeds nobody knows
};

}  // namespace bps::van
