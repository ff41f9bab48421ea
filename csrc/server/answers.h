// SPDX-License-Identifier: Apache-2.0
// The answers of a session that are not over: those that its connections have no room for, in the order in which they
// were posted; those in two phases that its worker has not said to have; and the word, which is still to be sent, that
// such rounds are complete for all. A full connection holds up no other.
//
// Threading: one thread. Memory: as much as was needed at one time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "server/slot_window.h"
#include "server/worker_paths.h"

namespace bps::server {

struct Landing {
  std::uint32_t immediate;
  Round* round;
  std::uint32_t contributor;
};

class Answers {
 public:
  // Both must outlive it.
  Answers(WorkerPaths& paths, SendsDue& sends_due) : paths_(paths), sends_due_(sends_due) {}

  // Sends an answer, now or when its connection has room again. False: so many wait that it is given up.
  bool post(const Answer& answer);
  // Sends those that wait, as far as there is room. Returns whether any was sent.
  bool flush();
  bool is_empty() const { return count_ == 0; }
  // Nobody will get those that wait, or that have not been confirmed.
  void give_up();
  // Removes those that wait for connections of a path.
  void take(const WorkerPath& path, std::vector<Answer>& taken);

  // ---- In two phases

  // The worker will say when it has this one.
  void expect(Round& round, const Arrival& arrival);
  // It says so. Returns nothing for an immediate that is not expected.
  std::optional<Landing> take_landed(std::uint32_t immediate);
  void forget(const Round& round) {
    std::erase_if(landings_, [&](const Landing& one) { return one.round == &round; });
  }
  // Tells the worker, with the next messages, that the round is complete for all.
  void commit(std::uint32_t immediate);
  bool has_commits() const { return !commits_.empty(); }
  void send_commits(std::uint32_t epoch);

 private:
  // As many as a worker can have in flight, see RoundTable::Limits.
  static constexpr std::size_t kMost = 1 << 20;
  struct Waiting {
    transport::DataEndpoint* data = nullptr;
    std::vector<Answer> answers{};
  };

  bool hold_up(const Answer& answer);
  // An answer by this connection has to wait behind others.
  bool holds_up(const transport::DataEndpoint* data) const {
    const auto found = std::ranges::find(waiting_, data, &Waiting::data);
    return found != waiting_.end() && !found->answers.empty();
  }
  void note_written(const Answer& answer) {
    if (paths_.fails_over()) paths_.keep(answer);
  }

  WorkerPaths& paths_;
  SendsDue& sends_due_;
  std::vector<Waiting> waiting_;
  std::size_t count_ = 0;  // of all that wait
  std::deque<Landing> landings_;
  std::vector<std::uint32_t> commits_;
};

inline bool Answers::post(const Answer& answer) {
  const bool may_write = !paths_.is_lost() && (count_ == 0 || !holds_up(answer.data));
  if (!may_write || answer.data->write({&answer.op, 1}) != 1) [[unlikely]]
    return hold_up(answer);
  note_written(answer);
  return true;
}

}  // namespace bps::server
