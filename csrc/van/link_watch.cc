// SPDX-License-Identifier: Apache-2.0
#include "van/link_watch.h"

#include <algorithm>
#include <cmath>

namespace bps::van {
namespace {

constexpr double kLeastBusy_us = 100e3;   // of the busiest flow between two looks: below it a slow link costs little
constexpr double kLeastBytes = 64 << 10;  // a flow with fewer says nothing, unless its link is known to be slow
constexpr int kLooks = 2;                 // so many looks have to agree
// The flows of a slow link are busy this many times as long as others. Those of a good one differ by up to 1.6 on a
// machine with a load of 13. A link that is known to be slow is followed more closely.
constexpr double kSlow = 1.6, kStillSlow = 1.3;
constexpr double kLess = 0.85, kStillLess = 0.75;  // changes by these factors are worth a shift
constexpr double kMargin = 0.9;  // a link with too much to do holds all up, one with too little costs little
constexpr double kTry = 2;
// A slow link that has little to do may seem twice as fast as it is, by what the queues before it take at once.
constexpr double kFaster = 3;
constexpr int kFirstPause = 10, kLongestPause = 160, kGoodTrial = 3;  // how many looks they last
constexpr double kFades = 0.5;
constexpr double kQuarter = 0.25;  // this share of the flows is below the one with which the others are compared

}  // namespace

// Holds what the flows between each two hosts, in each direction, have carried. Those to and from a link that has been
// found slow say nothing of the other host.
struct LinkWatch::Window {
  explicit Window(std::size_t hosts)
      : count(hosts), bytes(hosts * hosts), busy_us(hosts * hosts), is_slow(hosts, false), is_known(hosts, false) {}
  std::size_t at(std::size_t from, std::size_t to) const { return from * count + to; }
  bool counts(std::size_t flow, double least = kLeastBytes) const { return bytes[flow] >= least && busy_us[flow] > 0; }

  void for_each_flow(std::size_t host, bool in, auto&& look) const {
    for (std::size_t other = 0; other < count; ++other) {
      const std::size_t flow = in ? at(other, host) : at(host, other);
      if (counts(flow, is_known[host] ? 1 : kLeastBytes)) look(flow, !is_slow[other]);
    }
  }

  // Returns the mean time for which the flows of a host are busy, in the direction in which they are longer.
  double busy_of(std::size_t host) const {
    double longer = 0;
    for (const bool in : {false, true}) {
      double sum = 0;
      int flows = 0;
      for_each_flow(host, in, [&](std::size_t flow, bool tells) {
        if (!tells) return;
        sum += busy_us[flow];
        ++flows;
      });
      if (flows > 0) longer = std::max(longer, sum / flows);
    }
    return longer;
  }
  // Returns the time for which flows are busy on links that are not slow; 0: there are none.
  double usual_busy() const {
    std::vector<double> all;
    for (std::size_t flow = 0; flow < bytes.size(); ++flow) {
      if (counts(flow)) all.push_back(busy_us[flow]);
    }
    if (all.empty()) return 0;
    const auto quarter = all.begin() + static_cast<std::ptrdiff_t>(static_cast<double>(all.size()) * kQuarter);
    std::ranges::nth_element(all, quarter);
    return *quarter;
  }
  // Returns bytes per second while the link is busy, in the busier direction.
  double rate_of(std::size_t host) const {
    double best = 0;
    for (const bool in : {false, true}) {
      double longest = 0, sum = 0;
      for_each_flow(host, in, [&](std::size_t flow, bool tells) {
        if (tells) longest = std::max(longest, busy_us[flow]);
      });
      for_each_flow(host, in,
                    [&](std::size_t flow, bool) { sum += bytes[flow] * std::min(1.0, longest / busy_us[flow]); });
      if (longest > 0) best = std::max(best, sum / longest * 1e6);
    }
    return best;
  }

  std::size_t count;
  std::vector<double> bytes, busy_us;  // by at()
  std::vector<bool> is_slow;           // by host
  std::vector<bool> is_known;          // by host: it was slow before
};

LinkWatch::LinkWatch(const Membership& members) {
  std::map<std::string, std::size_t> known;
  for (const Node& node : members.nodes) {
    const auto [found, is_new] = known.emplace(node.host_key, hosts_.size());
    if (is_new) hosts_.push_back({.name = node.host});
    Host& host = hosts_[found->second];
    host.nominal = std::max(host.nominal, static_cast<double>(node.link));
    host_of_.push_back(found->second);
  }
}

bool LinkWatch::take(std::uint32_t node, const LinkUse& use) {
  for (const LinkUse::Peer& peer : use.peers) {
    if (peer.node == 0 || peer.node > host_of_.size()) return false;
    if (host_of_[peer.node - 1] == host_of_[node - 1]) continue;
    Flow& flow = flows_[{node, peer.node}];
    flow.bytes += static_cast<double>(peer.bytes);
    flow.busy_us += static_cast<double>(peer.busy_us);
  }
  return true;
}

// Returns what counts now. Of several flows between two hosts the longest counts. What earlier looks have seen counts
// half as much each time, since a single look sees a step or two.
LinkWatch::Window LinkWatch::window() {
  Window now(hosts_.size());
  for (auto& [nodes, flow] : flows_) {
    const std::size_t at = now.at(host_of_[nodes.first - 1], host_of_[nodes.second - 1]);
    now.bytes[at] += flow.bytes;
    now.busy_us[at] = std::max(now.busy_us[at], flow.busy_us);
    flow.bytes *= kFades;
    flow.busy_us *= kFades;
  }
  for (std::size_t i = 0; i < hosts_.size(); ++i) now.is_known[i] = hosts_[i].state != Host::State::kGood;
  return now;
}

std::optional<double> LinkWatch::judge(Host& host, double ratio, double rate, bool may_change) {
  using State = Host::State;
  const bool is_known = host.state != State::kGood;
  if (ratio >= (is_known ? kStillSlow : kSlow) && rate < used(host) * (is_known ? kStillLess : kLess)) {
    host.calm = host.faster = 0;
    if (++host.slower < kLooks || !may_change) return std::nullopt;
    if (host.state == State::kTried) host.pause = std::min(2 * host.pause, kLongestPause);
    if (!is_known) host.pause = kFirstPause;
    host.state = State::kSlow;
    return rate * kMargin;
  }
  host.slower = 0;
  if (!is_known) return std::nullopt;
  host.faster = rate >= used(host) * kFaster ? host.faster + 1 : 0;
  // All other hosts look good beside a trial that fails.
  const auto is_tried = [&](const Host& other) { return &other != &host && other.state == State::kTried; };
  if (std::ranges::any_of(hosts_, is_tried)) return std::nullopt;
  ++host.calm;
  if (host.state == State::kTried && host.calm >= kGoodTrial) {
    if (ratio > 0) host.pause = kFirstPause;  // a link that carries nothing has proved nothing
    host.state = used(host) >= nominal(host) * kLess ? State::kGood : State::kSlow;
    if (host.state == State::kSlow) host.faster = kLooks;  // the link may be faster still
  }
  if (host.state != State::kSlow || !may_change) return std::nullopt;
  // A host that has seemed fast before and was not is believed later.
  const int doubt = host.pause == kFirstPause ? 0 : std::max(kFirstPause, host.pause / 4);
  if ((host.faster < kLooks || host.calm < doubt) && host.calm < host.pause) return std::nullopt;
  host.state = State::kTried;
  return used(host) * kTry;
}

std::optional<std::vector<std::uint64_t>> LinkWatch::look(bool may_change) {
  Window now = window();
  const double usual = now.usual_busy();
  if (usual == 0 || std::ranges::max(now.busy_us) < kLeastBusy_us) return std::nullopt;
  // The slowest host comes first, then the others without their flows to it: that these are slow is not their fault.
  std::vector<double> busy(hosts_.size()), ratios(hosts_.size()), rates(hosts_.size()), links(hosts_.size());
  const auto look_at = [&](std::size_t i) {
    ratios[i] = busy[i] / usual;
    rates[i] = now.rate_of(i);
  };
  for (;;) {
    for (std::size_t i = 0; i < hosts_.size(); ++i) busy[i] = now.is_slow[i] ? 0 : now.busy_of(i);
    const auto worst = static_cast<std::size_t>(std::ranges::max_element(busy) - busy.begin());
    if (busy[worst] < usual * kStillSlow) break;
    look_at(worst);
    now.is_slow[worst] = true;
  }
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    if (!now.is_slow[i] && busy[i] > 0) look_at(i);
  }
  for (std::size_t i = 0; i < hosts_.size(); ++i) {  // a short flow of a slow link may seem faster than any link is
    if (!now.is_known[i]) usual_ = std::max(usual_, rates[i]);
  }
  // This is the part that the busiest link carries of what weights count on. What is measured at the start may be more
  // than a busy machine can carry.
  double part = 0;
  for (std::size_t i = 0; i < hosts_.size(); ++i) part = std::max(part, rates[i] / used(hosts_[i]));
  part = std::min(part, 1.0);
  bool changes = false, is_new = false;
  for (std::size_t i = 0; i < hosts_.size(); ++i) {
    links[i] = used(hosts_[i]);
    if (ratios[i] == 0 && hosts_[i].state == Host::State::kGood) continue;  // it carries nothing
    const auto link = judge(hosts_[i], ratios[i], rates[i] / part, may_change);
    is_new |= hosts_[i].slower == 1;
    if (!link) continue;
    links[i] = *link > nominal(hosts_[i]) * kLess ? nominal(hosts_[i]) : std::max(*link, 1.0);
    changes = true;
  }
  if (is_new) flows_.clear();  // what was before the link became slow does not tell how slow it is
  if (!changes) return std::nullopt;
  std::vector<std::uint64_t> by_node;
  for (const std::size_t host : host_of_) by_node.push_back(static_cast<std::uint64_t>(std::llround(links[host])));
  return by_node;
}

void LinkWatch::adopt(const std::vector<std::uint64_t>& links) {
  for (std::size_t i = 0; i < links.size(); ++i) {
    Host& host = hosts_[host_of_[i]];
    const auto link = static_cast<double>(links[i]);
    if (link != used(host)) host.slower = host.faster = host.calm = 0;
    host.used = link < nominal(host) * kLess ? link : 0;
  }
  flows_.clear();  // what has happened so far was with other weights
}

std::vector<LinkWatch::Slow> LinkWatch::slow() const {
  std::vector<Slow> all;
  for (const Host& host : hosts_) {
    if (used(host) < nominal(host) * kLess) all.push_back({host.name, host.used, nominal(host)});
  }
  return all;
}

}  // namespace bps::van
