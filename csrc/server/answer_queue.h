// SPDX-License-Identifier: Apache-2.0
// The answers of a session that its connections have no room for, in the order in which they were posted. A full
// connection holds up no other. Threading: one thread. Memory: as much as was needed at one time.
#pragma once

#include <algorithm>
#include <vector>

#include "server/worker_paths.h"

namespace bps::server {

class AnswerQueue {
 public:
  bool is_empty() const { return count_ == 0; }
  bool is_full() const { return count_ >= kMost; }
  // True: an answer by this connection has to wait behind others.
  bool holds_up(const transport::DataEndpoint* data) const {
    const auto found = std::ranges::find(waiting_, data, &Waiting::data);
    return found != waiting_.end() && !found->answers.empty();
  }
  void add(const Answer& answer) {
    const auto found = std::ranges::find(waiting_, answer.data, &Waiting::data);
    Waiting& waiting = found != waiting_.end() ? *found : waiting_.emplace_back(Waiting{answer.data, {}});
    waiting.answers.push_back(answer);
    ++count_;
  }
  // Writes what the connections have room for, and hands each answer to `written`. Returns whether any was written.
  template <typename Written>
  bool flush(Written&& written) {
    const std::size_t before = count_;
    for (Waiting& waiting : waiting_) {
      std::size_t sent = 0;
      for (; sent < waiting.answers.size(); ++sent) {
        const Answer& answer = waiting.answers[sent];
        if (waiting.data->write({&answer.op, 1}) != 1) break;
        written(answer);
      }
      waiting.answers.erase(waiting.answers.begin(), waiting.answers.begin() + static_cast<std::ptrdiff_t>(sent));
      count_ -= sent;
    }
    return count_ < before;
  }
  // Removes the answers by connections that `is_closed` names, and hands each to `taken`.
  template <typename IsClosed, typename Taken>
  void take(IsClosed&& is_closed, Taken&& taken) {
    for (const Waiting& waiting : waiting_) {
      if (!is_closed(waiting.data)) continue;
      for (const Answer& answer : waiting.answers) taken(answer);
      count_ -= waiting.answers.size();
    }
    std::erase_if(waiting_, [&](const Waiting& waiting) { return is_closed(waiting.data); });
  }

 private:
  // As many as a worker can have in flight, see RoundTable::Limits.
  static constexpr std::size_t kMost = 1 << 20;
  struct Waiting {
    transport::DataEndpoint* data = nullptr;
    std::vector<Answer> answers{};
  };

  std::vector<Waiting> waiting_;
  std::size_t count_ = 0;
};

}  // namespace bps::server
