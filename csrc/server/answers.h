// SPDX-License-Identifier: Apache-2.0
// Keeps the answers of a session that are not over. Some wait because their connection has no room, in the order in
// which they were posted; a full connection holds up no other. Others, in two phases, wait until the worker has said
// that it has them. It also keeps the commits that are still to be sent: they say that such rounds are complete for
// all.
//
// One thread uses it. It keeps as much memory as was needed at one time.
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

  // Sends an answer, now or when its connection has room again. Returns false where so many wait that it is given up.
  bool post(const Answer& answer);
  // Sends the answers that wait, as far as there is room. Returns whether any was sent.
  bool flush();
  bool is_empty() const { return count_ == 0; }
  // Gives up the answers that wait, and those that have not been confirmed. Nobody will get them.
  void give_up();
  // Moves the answers that wait for connections of a path to `taken`.
  void take(const WorkerPath& path, std::vector<Answer>& taken);

  // ---- In two phases

  // Notes that the worker will say when it has this answer.
  void expect(Round& round, const Arrival& arrival);
  // To be called when the worker says that it has an answer. Returns nothing for an immediate that is not expected.
  std::optional<Landing> take_landed(std::uint32_t immediate);
  void forget(const Round& round) {
    std::erase_if(landings_, [&](const Landing& one) { return one.round == &round; });
  }
  // Tells the worker, with the next messages, that the round is complete for all.
  void commit(std::uint32_t immediate);
  bool has_commits() const { return !commits_.empty(); }
  void send_commits(std::uint32_t epoch);

 private:
  // A worker can have as many in flight, see RoundTable::Limits.
  static constexpr std::size_t kMost = 1 << 20;
  struct Waiting {
    transport::DataEndpoint* data = nullptr;
    std::vector<Answer> answers{};
  };

  bool hold_up(const Answer& answer);
  // Returns true when an answer by this connection has to wait behind others.
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
  std::size_t count_ = 0;  // of all answers that wait
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
