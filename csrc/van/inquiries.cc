// SPDX-License-Identifier: Apache-2.0
#include "van/inquiries.h"

#include <algorithm>

#include "core/json.h"

namespace bps::van {
namespace {

// Each question makes all members work. So only this many are open at one time, and one of each peer that asks. Members
// have this long to reply before others may ask.
constexpr std::size_t kMostOpen = 16;
constexpr auto kPatience = std::chrono::seconds(1);

const char* name_of(Member::Fate fate) {
  switch (fate) {
    case Member::Fate::kHere: return "here";
    case Member::Fate::kLeft: return "left";
    case Member::Fate::kLost: return "lost";
  }
  return "";
}

}  // namespace

void Inquiries::ask(Peer from, const Ask& ask, MemberTable& members, const std::function<std::string()>& state) {
  const auto now = Clock::now();
  const auto is_old = [now](const Inquiry& one) { return now - one.since > kPatience; };
  std::erase_if(open_, [&](const Inquiry& one) { return one.from == from && is_old(one); });
  if (std::ranges::find(open_, from, &Inquiry::from) != open_.end()) return;
  if (open_.size() >= kMostOpen) {
    if (!is_old(open_.front())) return;
    open_.pop_front();
  }
  const Question question{++last_number_, ask.stacks};
  const std::vector<Peer> asked =
      members.peers([](const Member& member) { return member.connected && member.is_here(); });
  send_(from, Asked{ask.call, static_cast<std::uint32_t>(asked.size()), state()});
  if (asked.empty()) return;
  open_.push_back({question.number, from, ask.call, asked.size(), now});
  for (const Peer peer : asked) send_(peer, question);
}

void Inquiries::reply(const Member& from, const Reply& reply) {
  const auto inquiry = std::ranges::find(open_, reply.number, &Inquiry::number);
  if (inquiry == open_.end()) return;
  send_(inquiry->from, Told{inquiry->call, from.node->id, reply.report});
  if (--inquiry->left == 0) open_.erase(inquiry);
}

void Inquiries::closed(Peer from) {
  std::erase_if(open_, [from](const Inquiry& one) { return one.from == from; });
}

std::string describe_members(MemberTable& members, const std::function<std::int64_t(Peer)>& silence_ms) {
  JsonList list;
  for (const Member& member : members.all()) {
    JsonObject one;
    one.add("node", member.node->id).add("rank", member.node->worker_rank);
    one.add("server_rank", member.node->server_rank).add("host", member.node->host).add("pid", member.node->pid);
    one.add("fate", std::string(name_of(member.fate)));
    if (!member.farewell.empty()) one.add("farewell", member.farewell);
    if (member.connected) one.add("silent_ms", silence_ms(member.peer));
    list.add_raw(one.end());
  }
  return list.end();
}

}  // namespace bps::van
