// SPDX-License-Identifier: Apache-2.0
#include "van/link_follower.h"

#include <cstdio>
#include <string>
#include <utility>

#include "core/log.h"

namespace bps::van {
namespace {

constexpr auto kLook = std::chrono::milliseconds(900);  // comes with every second heartbeat

}  // namespace

bool LinkFollower::take(const Member& member, Rounds&& rounds) {
  if (!member.is_worker()) return false;
  const std::uint32_t done = shift_.done();
  const bool is_honest = shift_.take(member, std::move(rounds), group_of_);
  if (shift_.done() != done) note_shift();
  return is_honest;
}

void LinkFollower::look(Clock::time_point now) {
  shift_.look(now);
  if (now - looked_ < kLook || shift_.is_open()) return;
  looked_ = now;
  const std::chrono::seconds pause{members_.membership().nodes.front().terms.placement_seconds};
  if (auto links = watch_.look(now - shifted_ >= pause)) shift(std::move(*links), now);
}

void LinkFollower::shift(std::vector<std::uint64_t> links, Clock::time_point now) {
  if (links.size() != members_.membership().nodes.size()) return;
  shifted_ = now;
  shift_.begin(std::move(links), now);
}

// Is called when servers have other weights.
void LinkFollower::note_shift() {
  watch_.adopt(shift_.links());
  std::string text;
  for (const LinkWatch::Slow& slow : watch_.slow()) {
    char rates[64];
    (void)std::snprintf(rates, sizeof rates, " carries %.3g Gbit/s of %.3g", slow.is * 8 / 1e9, slow.was * 8 / 1e9);
    text += (text.empty() ? "" : ", ") + ("the link of " + slow.host) + rates;
  }
  log_info("servers sum other parts from now on: " + (text.empty() ? "no link is slow" : text));
}

void LinkFollower::describe(JsonObject& state) const {
  JsonList slow;
  for (const LinkWatch::Slow& one : watch_.slow()) {
    JsonObject link;
    link.add("host", one.host).add("gbps", one.is * 8 / 1e9).add("was_gbps", one.was * 8 / 1e9);
    slow.add_raw(link.end());
  }
  state.add("shifts", shift_.done()).add_raw("slow_links", slow.end());
}

}  // namespace bps::van
