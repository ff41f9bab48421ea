// SPDX-License-Identifier: Apache-2.0
// The redo log of a server loop, and the round that it tells of: members that share memory with this process read it if
// the process is lost, and so need one phase only (docs/notes/members.md, "When a server is lost").
//
// The log tells of one partition at a time. While a member of that round may have to learn from it that the round is
// over, because its answer has not been posted, no other round is summed over the log; those that want to be stand in a
// line. Threading: the server loop's.
#pragma once

#include <vector>

#include "server/round.h"
#include "server/sum_plan.h"

namespace bps::server {

class RedoLogTurn {
 public:
  // `log` must outlive it.
  void use(tensor::RedoLog* log) { log_ = log; }
  // The member that sends this push, in place or not, reads the log.
  bool is_read_after(const tensor::PushHeader& header, bool in_place) const {
    return in_place && log_ != nullptr && (header.flags & tensor::kForHost) == 0 &&
           header.place == tensor::PushHeader::kLogged;
  }

  // The pass goes by the log, if a member of the round reads it. False: another round has its turn, and this one waits.
  bool begin(Round& round, SumPlan& plan);
  // The round is summed, and members do not know that they have their answers.
  void hold(const Round& round);
  void commit(const Round& round) {
    if (holder_ == &round) holder_ = nullptr;
  }
  // A member that reads the log has been posted its answer.
  void note_posted(WorkerSession& session);
  // Answers to a member that is lost are dropped.
  void note_dropped(WorkerSession& session);
  void note_failed(const Round& round) { is_kept_ |= holder_ == &round; }
  // Moves the rounds that have waited for their turn to `free`, once the log is.
  void end_line(std::vector<Round*>& free);

 private:
  bool is_held() const;
  bool has_readers(const Round& round) const;

  tensor::RedoLog* log_ = nullptr;
  const Round* holder_ = nullptr;
  bool is_kept_ = false;  // up to the end of the view, which is near: an answer of the holder will never be posted
  std::vector<WorkerSession*> readers_;  // who have been posted answers of the last holder
  std::vector<Round*> line_;             // with Round::is_queued
};

}  // namespace bps::server
