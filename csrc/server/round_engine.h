// SPDX-License-Identifier: Apache-2.0
// The rounds of a server loop: takes a push, sums when the last one is there, and posts the answers.
//
// The way of a push: it lands in a slot, or is posted in place -> find_fault() -> admit() -> keep its place in the
// round -> sum() once the group is complete -> answer(). Sums run in the order of the group's ranks.
//
// Ranks may push in any order. When every worker that a round still waits for has used up its slots on other rounds,
// nothing would ever move again; exactly then each of those workers is granted one slot beyond its window. So memory is
// bounded by the windows unless the orders really differ, and then grows by what they differ.
//
// Memory: what is called by an endpoint never grows the pool. A round that lacks a slot waits for the next resume(),
// which grows the pool first; if that fails, the round fails for all its members. Each open round waits at most once.
//
// A group that has lost a member can complete no round. Its pushes are ignored, because the scheduler tells the workers
// of the loss; its rounds are dropped as soon as no answer reads their memory any more.
//
// Threading: one thread. Errors: a push that cannot be summed is answered with PushFailed and counted.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/metrics.h"
#include "server/round_table.h"
#include "server/sum.h"
#include "server/sum_plan.h"
#include "server/worker_session.h"

namespace bps::server {

class RoundEngine {
 public:
  RoundEngine(std::uint64_t largest_partition, const Sessions& sessions, SlotPool& pool, Counters& counters)
      : largest_partition_(largest_partition), sessions_(sessions), pool_(pool), counters_(counters) {}

  void add_group(const van::Group& group) { groups_.emplace(group.id, group); }

  // From the sessions: the data path.
  void on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate);
  void on_descriptor(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span);
  void on_written(std::uint64_t token);

  // Grants slots beyond the windows and grows the pool for the rounds that wait for that. Returns whether any did.
  bool resume();

  // No round of a group with this rank can complete.
  void lose_rank(std::uint32_t worker_rank) { lost_ranks_.insert(worker_rank); }
  // Drops the rounds of such groups. A result that is still being sent stays until it has been sent.
  void drop_lost();

  // The ranks that have not pushed this partition yet.
  std::vector<std::uint32_t> missing(const tensor::WhoIsMissing& question);
  std::size_t open_rounds() const { return table_.open().size(); }

 private:
  struct Push {
    WorkerSession& session;
    transport::DataEndpoint& from;
    tensor::PushHeader header;
    Slot* slot;                  // where it landed, or nullptr:
    transport::RemoteSpan span;  // the payload is in the worker's memory
  };

  // round_engine_data_path.cc
  void take(const Push& push);
  Round* admit(const Push& push);
  static void record(Round& round, Arrival& arrival, const Push& push);
  Status keep(Arrival& arrival);
  static void acknowledge(Arrival& arrival);
  void sum(Round& round);
  bool find_result_slot(Round& round);
  void answer(Round& round, Arrival& arrival);
  void close_if_over(Round& round);
  void release(Slot*& slot);
  bool has_lost_member(const van::Group& group) const;

  // round_engine.cc
  void wait(Round& round);
  bool waits_for_starved(const Round& round) const;
  void grant_overflow(const Round& round);
  void reserve(const Round& round);
  void proceed(Round& round);
  void refuse(WorkerSession& session, std::uint32_t immediate, const RoundFailure& why);
  void refuse_round(const Push& push, RoundTable::Found found);
  void refuse_failed(Round& round, Arrival& arrival, const Push& push);
  void disagree(Round& round, const WorkerSession& session);
  void fail(Round& round, RoundFailure why);
  void drop(Round& round);

  const std::uint64_t largest_partition_;
  const Sessions& sessions_;
  SlotPool& pool_;
  Counters& counters_;
  RoundTable table_;
  Summer summer_;
  SumPlan plan_;  // of the pass in progress; keeps its capacity
  std::unordered_map<std::uint32_t, van::Group> groups_;
  std::unordered_set<std::uint32_t> lost_ranks_;
  std::vector<Round*> waiting_;  // those with Round::waits, each once; others may stand here, closed meanwhile
  bool worker_ran_out_ = false;  // of slots: it may be the one that an open round waits for
};

}  // namespace bps::server
