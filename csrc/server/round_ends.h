// SPDX-License-Identifier: Apache-2.0
// Ends rounds: every member gets its answer, or every member is told of the failure.
//
// A failed round stays in the table until the last member has come, so that a late push finds it; a member that comes
// to it is refused. In a group that has lost a member nobody may ever come, so such a round ends at once. In two phases
// (tensor::kTwoPhase) members get answers that count once all of them have theirs, so that the loss of this process
// takes a result from nobody. Belongs to the server loop's thread. Errors: nothing here throws, but for a failure
// without memory to describe it.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "core/clock.h"
#include "core/metrics.h"
#include "server/compressed_sum.h"
#include "server/gone_ranks.h"
#include "server/redo_log_turn.h"
#include "server/round_table.h"
#include "tensor/host_sum.h"

namespace bps::server {

class RoundEnds {
 public:
  // All of these must outlive it.
  struct Parts {
    RoundTable& table;
    SlotPool& pool;
    Counters& counters;
    const RoundGroups& groups;
    const GoneRanks& gone;
    RedoLogTurn& log;
    CompressedSummer& compressed;
  };
  explicit RoundEnds(const Parts& parts) : parts_(parts) {}

  // Takes the sender by which a relay hears that all ranks of its host have a result.
  void relay_by(tensor::ContributionSender* network) { network_ = network; }
  std::function<void()> when_failed;  // a round has failed; to be set before the loop starts
  // Returns the last round that failed, and why, as a sentence without its end, or "" if none did.
  const std::string& last_failure() const { return last_failure_; }

  // ---- With a result (round_ends_data_path.cc)

  // Answers all members that wait, when the result is known. Where it is not written in place, it is copied or sent
  // from `result`, or from its `code` to those that compress.
  void answer_all(Round& round, const std::byte* result, const std::byte* code = nullptr);
  // Answers one member, whose wait is over.
  void answer(Round& round, Arrival& arrival, const std::byte* result);
  // Tells a member that its payload is here.
  static void acknowledge(Arrival& arrival);
  // Releases the slot, if there is one, because its bytes have been consumed.
  void release(Slot*& slot) {
    if (slot != nullptr) SlotWindow::release(std::exchange(slot, nullptr), parts_.pool);
  }
  // To be called when the bytes of the write that carries this token have been read.
  void on_written(std::uint64_t token);
  // Closes the round if nobody waits for it any more. Where `now` is 0 the clock is read.
  void close_if_over(Round& round, std::uint64_t now = 0) {
    const Round::Counts& counts = round.counts;
    if (round.is_with_servers() || counts.done < round.contributors->size() || counts.writes_in_flight > 0) return;
    release(round.result);
    parts_.table.close(&round, now != 0 ? now : coarse_now_ns());
  }
  void trace(TraceStage stage, const Round& round, std::uint32_t rank);

  // ---- In two phases (round_ends.cc)

  // Passes the servers' answer to a host on to its ranks. The servers have not committed yet.
  void propose_host(Round& round, const std::byte* result);
  // To be called when members have the answers with these immediates.
  void on_landed(WorkerSession& session, std::span<const std::uint32_t> immediates);
  // Commits a round whose members all have the result. From now on the loss of this process takes it from nobody.
  void commit(Round& round);

  // ---- Without one (round_ends.cc)

  // Fails the round, and tells everyone who waits for something. A member whose push was acknowledged learns of it when
  // it pulls. `missing` are the worker ranks that the servers still waited for.
  void fail(Round& round, const Error& why, std::span<const std::uint32_t> missing = {});
  void refuse(WorkerSession& session, std::uint32_t immediate, const Error& why);
  // Ends the wait for members of a failed round that perhaps never come.
  void end_for_absent(Round& round);

 private:
  void enter_summed(Round& round, RoundPhase phase) {
    round.enter(phase);
    round.history.summed_at = coarse_now_ns();
    parts_.counters.rounds.add();
    parts_.counters.summed_bytes.add(round.first.length);
    if (parts_.counters.trace != nullptr) trace(TraceStage::kSummed, round, 0);
  }
  void post(Round& round, Arrival& arrival, const std::byte* result);
  void propose_all(Round& round, const std::byte* result);
  void propose(Round& round, Arrival& arrival, const std::byte* result);
  void end_landing(Round& round);
  void note_failure(const Round& round);
  void tell_relays(const Round& round);

  const Parts parts_;
  tensor::ContributionSender* network_ = nullptr;
  std::string last_failure_;
};

}  // namespace bps::server
