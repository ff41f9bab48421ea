// SPDX-License-Identifier: Apache-2.0
// Finds the hosts whose links carry less than the weights of servers count on, or as much as they should again, from
// what members tell of their connections (LinkUse).
//
// A link is slow when the connections of its host have bytes on their way much longer than those between other hosts. A
// rank that is late does not make a link slow: nothing of it is on its way. What a slow link carries is measured while
// it is busy, and a link is slow only if it carries less than others do of what they should. Two looks in a row must
// agree. Whether it is faster again is tried: it gets twice as much to do, after a pause, which doubles each time that
// it was not. When it carries much more than it is counted on for, it is tried at once, or after a quarter of that
// pause where a trial has failed: a link that limits what is sent by a bucket of tokens seems fast when it has little
// to do.
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

  // False: no honest member says this.
  bool take(std::uint32_t node, const LinkUse& use);
  // Once a second or so. The links that weights should follow from now on, of all nodes; nothing: as they are, or it is
  // too early for a change.
  std::optional<std::vector<std::uint64_t>> look(bool may_change);
  // These are in use from now on.
  void adopt(const std::vector<std::uint64_t>& links);

  // A host whose link is slow.
  struct Slow {
    std::string host;
    double is, was;  // bytes per second
  };
  std::vector<Slow> slow() const;

 private:
  struct Host {
    enum class State : std::uint8_t { kGood, kSlow, kTried };  // kTried: it is slow, and gets more for a trial

    std::string name;
    double nominal = 0;  // bytes per second, as it joined; 0: unknown
    double used = 0;     // that weights follow; 0: as nominal
    State state = State::kGood;
    // Looks in a row that found it slower than that, faster, or neither (which faster ones are, too).
    int slower = 0, faster = 0, calm = 0;
    int pause = 0;  // the next trial comes after so many calm looks
  };
  struct Flow {  // lately
    double bytes = 0, busy_us = 0;
  };
  struct Window;  // what has happened between two looks

  Window window();
  // `ratio`: how much longer its flows are busy than those of others. What weights should count on; nothing: as before.
  std::optional<double> judge(Host& host, double ratio, double rate, bool may_change);
  double nominal(const Host& host) const { return host.nominal > 0 ? host.nominal : usual_; }
  double used(const Host& host) const { return host.used > 0 ? host.used : nominal(host); }

  std::vector<std::size_t> host_of_;  // by node - 1
  std::vector<Host> hosts_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Flow> flows_;  // by the nodes from which and to which it goes
  double usual_ = 0;                                               // what links carry whose speeds nobody knows
};

}  // namespace bps::van
