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
// Where sums happen on the host first (van/hosts.h), the same rounds run twice. On a relay, a round for the host is
// complete when the ranks of the host have pushed; its sum is then the host's contribution to the round of the network,
// which goes out by a ContributionSender, and whose answer is the result. There a host counts as one contributor.
//
// Where servers keep weights (stored_partition.h), a rank adds to them in rounds of its own, which wait for nobody.
//
// Threading: one thread. Errors: a push that cannot be summed is answered with PushFailed and counted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/metrics.h"
#include "server/compressed_sum.h"
#include "server/memory_shares.h"
#include "server/open_round.h"
#include "server/round_table.h"
#include "server/stored_partition.h"
#include "server/sum.h"
#include "server/sum_plan.h"
#include "server/worker_session.h"
#include "tensor/host_sum.h"
#include "tensor/key_map.h"

namespace bps::server {

class RoundEngine final : public tensor::ContributionSource {
 public:
  struct Limits {
    std::uint64_t largest_partition = 0;
    std::uint32_t epoch = 1;
    Location here{};
    std::string name{};  // of this process, for errors that members are told
    RoundTable::Limits table{};
    std::uint64_t kept_bytes = ~std::uint64_t{0};  // between rounds, for each rank: see MemoryShares
  };
  RoundEngine(const Limits& limits, const van::Hosts& hosts, const Sessions& sessions, SlotPool& pool,
              Counters& counters)
      : limits_(limits),
        hosts_(hosts),
        sessions_(sessions),
        pool_(pool),
        counters_(counters),
        table_(limits.table),
        shares_(limits.kept_bytes) {}

  void add_group(const van::Group& group) {
    groups_.emplace(group.id, std::make_unique<RoundGroup>(group, hosts_, limits_.here));
  }
  // Answers to this session that wait are dropped, because it is lost.
  void drop_answers(const WorkerSession& session);
  // For members that share memory with this process and want to know what it was about to write.
  void log_to(tensor::RedoLog* log) { redo_log_ = log; }
  // The way to the servers for what this host contributes.
  void relay_by(tensor::ContributionSender* network) { network_ = network; }

  // From the sessions: the data path.
  void on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed);
  void on_descriptor(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span);
  void on_written(std::uint64_t token);
  void on_landed(WorkerSession& session, std::span<const std::uint32_t> immediates);

  // Answers to pushes that came by `closed` go out by another connection, and to memory that it has another key for.
  void reroute(const transport::DataEndpoint& closed,
               const std::function<void(transport::DataEndpoint*& data, std::uint64_t& key)>& change) {
    for (Round* round : table_.open()) {
      for (Arrival& arrival : round->arrivals) {
        if (arrival.data == &closed) change(arrival.data, arrival.answer_key);
      }
    }
  }

  // Grants slots beyond the windows and grows the pool for the rounds that wait for that. Returns whether any did.
  bool resume();

  // No round of a group with this rank can complete; but what a rank has pushed that has left before counts, although
  // its connections have closed. `why` is a sentence; the first one counts.
  void lose_rank(std::uint32_t worker_rank, const std::string& why) {
    const auto [gone, is_first] = gone_ranks_.try_emplace(worker_rank, Gone{why, Gone::State::kLost});
    if (!is_first && gone->second.state == Gone::State::kLeft) gone->second.state = Gone::State::kClosed;
  }
  // The view has ended: from here on rounds fail with this error, whichever member is the cause.
  void end_view(const Error& why) { view_ended_ = RoundFailure{why.code(), why.what(), why.hint()}; }
  // It pushes nothing more; what it has pushed counts.
  void leave_rank(std::uint32_t worker_rank, const std::string& why) {
    gone_ranks_.try_emplace(worker_rank, Gone{why, Gone::State::kLeft});
  }
  // Fails the rounds that these ranks keep from completing. A result that is still being sent stays until it has been
  // sent.
  void fail_lost();

  // A member gives these partitions up. From the return on nothing reads or writes its memory for them, except the
  // answers that the reply names.
  tensor::Cancelled cancel(WorkerSession& session, const tensor::Cancel& cancel);
  std::size_t open_rounds() const { return table_.open().size(); }
  // The first `most` of them.
  std::vector<OpenRound> list_open(std::size_t most) const;
  // Since the oldest of them was opened, in seconds; 0 if none is.
  double oldest_s() const;
  // Those that are over; from any thread.
  const RoundRecorder& recorder() const { return table_.recorder(); }
  // The last round that failed, and why, as a sentence without its end; "" if none did.
  const std::string& last_failure() const { return last_failure_; }
  std::function<void()> when_failed;  // a round; set before the loop starts

  // From the network, for a relay.
  Status read(std::uint32_t contribution, std::byte* into) override;
  void land(std::uint32_t contribution, const std::byte* result) override;
  void deliver(std::uint32_t contribution, const std::byte* result) override;
  void fail(std::uint32_t contribution, const Error& why, std::span<const std::uint32_t> missing) override;
  void fail_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t round,
                  const Error& why) override;

 private:
  struct Push {
    WorkerSession& session;
    transport::DataEndpoint& from;
    tensor::PushHeader header;
    Slot* slot;                                          // where it landed, or nullptr:
    transport::RemoteSpan span;                          // the payload is in the worker's memory
    std::uint64_t arrived;                               // bytes of it, as the transport knows
    std::uint32_t contributor = 0;                       // to the round that it belongs to, once that is known
    const compress::Compression* compression = nullptr;  // of the payload
    std::uint64_t payload = 0;                           // its bytes
  };

  // round_engine_data_path.cc
  const RoundGroup* find_group(std::uint32_t id, std::uint32_t sender_rank) {
    if (latest_group_ != nullptr && latest_group_->group.id == id) return latest_group_;
    const auto found = groups_.find(id);
    if (found == groups_.end()) return id == (tensor::kAlone | sender_rank) ? add_alone(sender_rank) : nullptr;
    return latest_group_ = found->second.get();
  }
  void take(Push& push);
  Round* admit(Push& push);
  static void record(Round& round, Arrival& arrival, const Push& push);
  Status keep(Arrival& arrival);
  static void acknowledge(Arrival& arrival);
  void complete(Round& round);
  void sum(Round& round);
  void end_pass(Round& round, Status status, WorkerSession* broken);
  void sum_compressed(Round& round);
  std::uint64_t compressed_bytes(Push& push, std::uint64_t room);
  std::uint64_t payload_bytes(Push& push);
  static bool is_long(const Push& push, std::uint64_t due);
  bool find_result_slot(Round& round);
  void answer_all(Round& round, const std::byte* result, const std::byte* code = nullptr);
  void enter_summed(Round& round, RoundPhase phase) {
    round.enter(phase);
    round.history.summed_at = coarse_now_ns();
    counters_.rounds.add();
    counters_.summed_bytes.add(round.first.length);
    if (counters_.trace != nullptr) trace(TraceStage::kSummed, round, 0);
  }
  void answer(Round& round, Arrival& arrival, const std::byte* result);
  void post(Round& round, Arrival& arrival, const std::byte* result);
  void close_if_over(Round& round, std::uint64_t now = 0);  // 0: the clock is read
  void release(Slot*& slot);
  void trace(TraceStage stage, const Round& round, std::uint32_t rank);

  // round_engine.cc
  struct Gone {
    enum class State : std::uint8_t {
      kLeft,    // it pushes nothing more, but what it relays for others
      kClosed,  // the same, and it cannot be reached any more
      kLost,
    };
    std::string why;
    State state;
  };
  RoundFailure failure_of(const std::string& loss) const;
  const std::string* why_gone(const RoundGroup& group, const RoundKey& key, const Round* round,
                              tensor::OperationKind kind) const;
  bool cannot_contribute(const RoundGroup& group, std::uint32_t rank, const Gone& gone, const RoundKey& key,
                         const Round* round, tensor::OperationKind kind) const;
  bool lacks_speaker(const RoundGroup& group, std::uint32_t rank, const RoundKey& key, const Round* round) const;
  const std::string* why_incomplete(const RoundGroup& group) const;
  void end_for_absent(Round& round);
  bool is_gone(const Round& round, std::uint32_t contributor) const;
  std::uint32_t contributor_of(const RoundGroup& group, std::uint32_t rank, bool for_host) const;
  std::uint32_t speaker_of(const Round& round, std::uint32_t contributor) const {
    return speaker_of(*round.group, round.key, contributor);
  }
  std::uint32_t speaker_of(const RoundGroup& group, const RoundKey& key, std::uint32_t contributor) const;
  WorkerSession* session_of(const Round& round, std::uint32_t contributor) const;
  enum class Outcome : std::uint8_t { kAborted, kAnswered, kPending };
  Outcome cancel(Round& round, std::uint32_t contributor, std::uint32_t immediate, const tensor::Cancel& cancel,
                 std::vector<std::uint32_t>& missing);
  void fail_cancelled(Round& round, std::uint32_t contributor, const tensor::Cancel& cancel,
                      std::vector<std::uint32_t>& missing);
  std::vector<std::uint32_t> ranks_without_push(const Round& round, std::uint32_t except) const;
  void wait(Round& round);
  bool waits_for_starved(const Round& round) const;
  void grant_overflow(const Round& round);
  void reserve(const Round& round);
  void proceed(Round& round);
  void refuse(WorkerSession& session, std::uint32_t immediate, const RoundFailure& why);
  void reject(WorkerSession& session);
  void refuse_round(const Push& push, const RoundGroup& group, RoundTable::Found found);
  bool refuse_gone(const Push& push, const RoundGroup& group);
  void refuse_failed(Round& round, Arrival& arrival, const Push& push);
  void disagree(Round& round, Arrival& arrival, const Push& push);
  bool fits(Round& round);
  static RoundFailure no_memory();
  void fail(Round& round, RoundFailure why, std::span<const std::uint32_t> missing = {});
  void note_failure(const Round& round);
  void tell_network(const Round& round, const RoundFailure& why) {
    tell_network(round.key, round.number, round.peers.onward_server, why);
  }
  void tell_network(const RoundKey& key, std::uint32_t number, std::uint32_t place, const RoundFailure& why);
  void tell_relays(const Round& round);

  // round_engine_two_phase.cc
  void propose_all(Round& round, const std::byte* result);
  void propose(Round& round, Arrival& arrival, const std::byte* result);
  void end_landing(Round& round);
  void commit(Round& round);
  void note_logged(Arrival& arrival, const Push& push) const;
  bool has_logged(const Round& round) const;
  bool is_log_held() const;
  bool plan_log(Round& round);
  void resume_behind_log();

  // round_engine_stored.cc
  const RoundGroup* add_alone(std::uint32_t rank);
  StoredPartition* find_stored(const RoundKey& key);
  bool plan_kept(Round& round);
  bool make_stored(Round& round);
  bool keep_stored(Round& round);
  void unstore(Round& round);
  void forget(StoredPartition& stored);
  void accumulate(Round& round);
  void go_on(StoredPartition& stored, bool whatever);
  std::vector<std::uint32_t> ranks_behind(const Round& round) const;
  bool is_gone_rank(std::uint32_t rank) const { return gone_ranks_.contains(rank); }

  // round_engine_host.cc
  // What a push may bring: a relay must be able to pass it on.
  std::uint64_t largest(const tensor::PushHeader& header) const {
    if ((header.flags & tensor::kForHost) == 0) return limits_.largest_partition;
    if (network_ == nullptr) return 0;
    const std::uint64_t most = std::min(network_->largest(), limits_.largest_partition);
    if (!is_exact(header.op)) return most;
    return tensor::most_unrounded_elements(header.dtype, most) * size_of(header.dtype);
  }
  void contribute(Round& round);
  bool keep_result(Round& round, const std::byte* result);

  const Limits limits_;
  const van::Hosts& hosts_;
  const Sessions& sessions_;
  SlotPool& pool_;
  Counters& counters_;
  RoundTable table_;
  MemoryShares shares_;  // weights, and what compression has lost
  Summer summer_;
  CompressedSummer compressed_summer_{shares_};
  SumPlan plan_;                                   // of the pass in progress; keeps its capacity
  tensor::ContributionSender* network_ = nullptr;  // of a relay
  std::unordered_map<std::uint32_t, std::unique_ptr<RoundGroup>> groups_;
  const RoundGroup* latest_group_ = nullptr;  // most pushes belong to the same one as the push before
  std::optional<RoundFailure> view_ended_;
  std::string last_failure_;
  std::unordered_map<std::uint32_t, Gone> gone_ranks_;
  std::unordered_map<RoundKey, StoredPartition, RoundKeyHash> stored_;
  StoredPartition storing_;  // of the pass in progress
  tensor::RedoLog* redo_log_ = nullptr;
  // The log tells of one partition at a time. While a member of that round may have to learn from it that the round is
  // over, because its answer has not been posted, no other is summed over the log.
  const Round* log_holder_ = nullptr;
  bool is_log_kept_ = false;  // up to the end of the view, which is near: such an answer will not be posted any more
  std::vector<const WorkerSession*> log_readers_;
  std::vector<Round*> behind_log_;  // rounds with Round::is_queued, as below
  std::vector<Round*> waiting_;     // those with Round::is_queued, each once; others may stand here, closed meanwhile
  bool worker_ran_out_ = false;     // of slots: it may be the one that an open round waits for
};

}  // namespace bps::server
