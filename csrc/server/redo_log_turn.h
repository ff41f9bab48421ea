// SPDX-License-Identifier: Apache-2.0
// Decides which round has the redo log of a server loop. Members that share memory with this process read the log if
// the process is lost, and so need one phase only (docs/notes/members.md, "When a server is lost").
//
// The log tells of one partition at a time. While a member of that round may have to learn from the log that the round
// is over, because its answer has not been posted, no other round is summed over the log. Rounds that want to be wait
// in a line. Belongs to the server loop's thread.
#pragma once

#include <vector>

#include "server/round.h"
#include "server/sum_plan.h"

namespace bps::server {

class RedoLogTurn {
 public:
  // `log` must outlive it.
  void use(tensor::RedoLog* log) { log_ = log; }
  // Returns true where the member that sends this push, `in_place` or not, reads the log.
  bool is_read_after(const tensor::PushHeader& header, bool in_place) const {
    return in_place && log_ != nullptr && (header.flags & tensor::kForHost) == 0 &&
           header.place == tensor::PushHeader::kLogged;
  }

  // Makes the pass write to the log first, if a member of the round reads it. Returns false where another round has its
  // turn, and this one waits.
  bool begin(Round& round, SumPlan& plan);
  // Notes that the round is summed, and that members do not know yet that they have their answers.
  void hold(const Round& round);
  void commit(const Round& round) {
    if (holder_ == &round) holder_ = nullptr;
  }
  // Notes that a member that reads the log has been posted its answer.
  void note_posted(WorkerSession& session);
  // To be called when answers to a member that is lost are dropped.
  void note_dropped(WorkerSession& session);
  void note_failed(const Round& round) { is_kept_ |= holder_ == &round; }
  // Moves the rounds that have waited for their turn to `free`, once the log is free.
  void end_line(std::vector<Round*>& free);

 private:
  bool is_held() const;
  bool has_readers(const Round& round) const;

  tensor::RedoLog* log_ = nullptr;
  const Round* holder_ = nullptr;
  bool is_kept_ = false;  // to the end of the view, which is near: an answer of the holder will not be posted
  std::vector<WorkerSession*> readers_;  // those who have been posted answers of the last holder
  std::vector<Round*> line_;             // rounds that wait; they have Round::is_queued
};

}  // namespace bps::server
