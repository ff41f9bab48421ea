// SPDX-License-Identifier: Apache-2.0
#include "van/shift.h"

#include <algorithm>
#include <utility>

namespace bps::van {
namespace {

// A worker's van answers at once, whatever its program does. One that is stopped must not hold up the others for long.
constexpr auto kShiftPatience = std::chrono::milliseconds(500);

}  // namespace

void Shift::tell_workers(const Message& message) {
  tell_(members_.peers([](const Member& member) { return member.is_worker() && member.connected; }), message);
}

void Shift::begin(std::vector<std::uint64_t> links, Clock::time_point now) {
  const auto is_gone = [](const Member& member) { return member.fate != Member::Fate::kHere; };
  if (open_ || std::ranges::any_of(members_.all(), is_gone)) return;
  open_ = Open{.links = std::move(links),
               .until = now + kShiftPatience,
               .has_answered = std::vector<bool>(members_.membership().workers),
               .latest = {},
               .ranks_after = {}};
  tell_workers(BeginShift{++number_});
}

bool Shift::take(const Member& worker, Rounds&& rounds, const GroupOf& group_of) {
  if (rounds.number > number_) return false;
  if (!open_ || rounds.number != number_) return true;  // the shift was called off meanwhile
  if (open_->has_answered[worker.rank()]) return false;
  const auto before = [&](const TensorRound& next) {
    const auto found = std::ranges::lower_bound(from_, next.key(), {}, &TensorRound::key);
    return found != from_.end() && found->key() == next.key() ? found->round : 0;
  };
  for (const TensorRound& next : rounds.next) {
    const Group* const group = group_of(next.group);
    if (group == nullptr || group->index_of(worker.rank()) == kNoRank) return false;
    TensorRound& latest = open_->latest.try_emplace(next.key(), next).first->second;
    latest.round = std::max(latest.round, next.round);
    if (next.round >= before(next)) ++open_->ranks_after[next.key()];
  }
  open_->has_answered[worker.rank()] = true;
  if (++open_->answers == open_->has_answered.size()) end(group_of);
  return true;
}

bool Shift::is_through(const GroupOf& group_of) const {
  return std::ranges::all_of(from_, [&](const TensorRound& from) {
    const auto found = open_->ranks_after.find(from.key());
    return found != open_->ranks_after.end() && found->second == group_of(from.group)->size();
  });
}

void Shift::end(const GroupOf& group_of) {
  if (!is_through(group_of)) return call_off();
  from_.clear();
  for (const auto& [key, latest] : open_->latest) from_.push_back(latest);
  links_ = std::move(open_->links);
  open_.reset();
  ++done_;
  tell_workers(EndShift{number_, links_, from_});
}

void Shift::call_off() {
  if (!open_) return;
  open_.reset();
  tell_workers(EndShift{number_, {}, {}});
}

void Shift::look(Clock::time_point now) {
  if (open_ && now > open_->until) call_off();
}

}  // namespace bps::van
