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
// A round ends for everybody or for nobody: it is summed, and then every member gets its answer; or it fails, and then
// every member is told, now if it waits for something, else when it comes. A failed round stays in the table until the
// last member has come, so that a late push finds it. A member that gives an operation up says Cancel, which fails the
// rounds that are not summed. A group that has lost a member fails all rounds that are not summed, and all later ones.
//
// Threading: one thread. Errors: a push that cannot be summed is answered with PushFailed and counted.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/metrics.h"
#include "server/round_table.h"
#include "server/sum.h"
#include "server/sum_plan.h"
#include "server/worker_session.h"

namespace bps::server {

class RoundEngine {
 public:
  struct Limits {
    std::uint64_t largest_partition = 0;
    std::uint32_t epoch = 1;
    RoundTable::Limits table{};
  };
  RoundEngine(const Limits& limits, const Sessions& sessions, SlotPool& pool, Counters& counters)
      : limits_(limits), sessions_(sessions), pool_(pool), counters_(counters), table_(limits.table) {}

  void add_group(const van::Group& group) { groups_.emplace(group.id, group); }

  // From the sessions: the data path.
  void on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate);
  void on_descriptor(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span);
  void on_written(std::uint64_t token);

  // Grants slots beyond the windows and grows the pool for the rounds that wait for that. Returns whether any did.
  bool resume();

  // No round of a group with this rank can complete. `why` is a sentence; the first one counts.
  void lose_rank(std::uint32_t worker_rank, const std::string& why) {
    gone_ranks_[worker_rank].lost = true;
    if (gone_ranks_[worker_rank].why.empty()) gone_ranks_[worker_rank].why = why;
  }
  // It pushes nothing more; what it has pushed counts.
  void leave_rank(std::uint32_t worker_rank, const std::string& why) {
    gone_ranks_.try_emplace(worker_rank, Gone{why});
  }
  // Fails the rounds that these ranks keep from completing. A result that is still being sent stays until it has been
  // sent.
  void fail_lost();

  // A member gives these partitions up. From the return on nothing reads or writes its memory for them, except the
  // answers that the reply names.
  tensor::Cancelled cancel(WorkerSession& session, const tensor::Cancel& cancel);
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

  // round_engine.cc
  struct Gone {
    std::string why;
    bool lost = false;
  };
  const std::string* why_gone(const van::Group& group, const Round* round) const;
  bool cancel(Round& round, std::uint32_t member, std::uint32_t immediate, const tensor::Cancel& cancel,
              std::vector<std::uint32_t>& missing);
  void wait(Round& round);
  bool waits_for_starved(const Round& round) const;
  void grant_overflow(const Round& round);
  void reserve(const Round& round);
  void proceed(Round& round);
  void refuse(WorkerSession& session, std::uint32_t immediate, const RoundFailure& why);
  void reject(WorkerSession& session);
  void refuse_round(const Push& push, RoundTable::Found found);
  bool refuse_gone(const Push& push, const van::Group& group);
  void refuse_failed(Round& round, Arrival& arrival, const Push& push);
  void disagree(Round& round, const WorkerSession& session);
  void fail(Round& round, RoundFailure why);

  const Limits limits_;
  const Sessions& sessions_;
  SlotPool& pool_;
  Counters& counters_;
  RoundTable table_;
  Summer summer_;
  SumPlan plan_;  // of the pass in progress; keeps its capacity
  std::unordered_map<std::uint32_t, van::Group> groups_;
  std::unordered_map<std::uint32_t, Gone> gone_ranks_;
  std::vector<Round*> waiting_;  // those with Round::waits, each once; others may stand here, closed meanwhile
  bool worker_ran_out_ = false;  // of slots: it may be the one that an open round waits for
};

}  // namespace bps::server
