// SPDX-License-Identifier: Apache-2.0
#include "server/answers.h"

namespace bps::server {

// Keeps an answer for which there is no room now. One that has nobody to go to is given up.
bool Answers::hold_up(const Answer& answer) {
  if (paths_.is_lost() || count_ >= kMost) {
    answer.give_up();
    return paths_.is_lost();
  }
  const auto found = std::ranges::find(waiting_, answer.data, &Waiting::data);
  Waiting& waiting = found != waiting_.end() ? *found : waiting_.emplace_back(Waiting{answer.data, {}});
  waiting.answers.push_back(answer);
  ++count_;
  sends_due_.answers = true;
  return true;
}

bool Answers::flush() {
  const std::size_t before = count_;
  for (Waiting& waiting : waiting_) {
    std::size_t sent = 0;
    for (; sent < waiting.answers.size(); ++sent) {
      const Answer& answer = waiting.answers[sent];
      if (waiting.data->write({&answer.op, 1}) != 1) break;
      note_written(answer);
    }
    waiting.answers.erase(waiting.answers.begin(), waiting.answers.begin() + static_cast<std::ptrdiff_t>(sent));
    count_ -= sent;
  }
  return count_ < before;
}

void Answers::give_up() {
  for (const Waiting& waiting : waiting_) {
    for (const Answer& answer : waiting.answers) answer.give_up();
  }
  waiting_.clear();
  count_ = 0;
  for (WorkerPath& path : paths_.all()) {
    for (AnswerStream& stream : path.streams) stream.give_up();
  }
}

void Answers::take(const WorkerPath& path, std::vector<Answer>& taken) {
  for (const AnswerStream& stream : path.streams) {
    const auto found = std::ranges::find(waiting_, stream.data, &Waiting::data);
    if (found == waiting_.end()) continue;
    taken.insert(taken.end(), found->answers.begin(), found->answers.end());
    count_ -= found->answers.size();
    waiting_.erase(found);
  }
}

// ---- In two phases

void Answers::expect(Round& round, const Arrival& arrival) {
  landings_.push_back({arrival.immediate, &round, static_cast<std::uint32_t>(&arrival - round.arrivals.data())});
}

// Answers land in the order in which they were posted, except those of several connections.
std::optional<Landing> Answers::take_landed(std::uint32_t immediate) {
  const auto found = std::ranges::find(landings_, immediate, &Landing::immediate);
  if (found == landings_.end()) return std::nullopt;
  const Landing landing = *found;
  landings_.erase(found);
  return landing;
}

void Answers::commit(std::uint32_t immediate) {
  commits_.push_back(immediate);
  sends_due_.commits = true;
}

void Answers::send_commits(std::uint32_t epoch) {
  if (!paths_.is_lost() && !paths_.control().empty()) {
    for (std::span<const std::uint32_t> left(commits_); !left.empty();) {
      const auto part = left.first(std::min(tensor::kMostLanded, left.size()));
      (void)paths_.control().send(encode(tensor::Committed{{part.begin(), part.end()}}, epoch));
      left = left.subspan(part.size());
    }
  }
  commits_.clear();
}

}  // namespace bps::server
