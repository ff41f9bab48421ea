// SPDX-License-Identifier: Apache-2.0
// Runs the rounds of a server loop: it takes pushes, sums when the last one is there, and posts the answers.
//
// A push lands in a slot, or is posted in place. The PushAdmission finds its round. Once the group is complete the
// round is summed (RoundSums), and every member gets its answer (RoundEnds). Sums run in the order of the group's
// ranks.
//
// A round ends for everybody or for nobody. Either it is summed, and every member gets its answer. Or it fails, and
// every member is told, now if it waits for something, else when it comes. A member that gives an operation up sends
// Cancel, which fails the rounds that are not summed. A group that has lost a member fails all rounds that are not
// summed, and all later ones. docs/notes/operations.md draws the states of a round.
//
// The same rounds run twice where sums happen on the host first (van/hosts.h). On a relay, a round for the host is
// complete when the ranks of the host have pushed; its sum is then the host's contribution to the round of the network.
// The HostRelay passes it on, and the answer to it is the result. A server counts a host as one contributor.
//
// A rank adds to weights that servers keep (StoredWeights) in rounds of its own, which wait for nobody.
//
// One thread uses it. Errors: a push that cannot be summed is answered with PushFailed and counted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/open_round.h"
#include "server/push_admission.h"
#include "server/stored_weights.h"

namespace bps::server {

class RoundEngine {
 public:
  struct Options {
    std::uint64_t largest_partition = 0;
    std::uint32_t epoch = 1;
    Location here{};
    std::string name{};  // the name of this process, for errors that members are told
    RoundTable::Limits table{};
    std::uint64_t kept_bytes = ~std::uint64_t{0};  // between rounds, for each rank: see MemoryShares
  };
  // All of these but the options must outlive it.
  RoundEngine(const Options& options, const van::Hosts& hosts, const Sessions& sessions, SlotPool& pool,
              Counters& counters);

  void add_group(const van::Group& group) { groups_.add(group); }
  // Makes rounds use a redo log, for members that share memory with this process and want to know what it was about to
  // write.
  void log_to(tensor::RedoLog* log) { log_.use(log); }
  // Makes this process a relay of its host, which sends by `network` what the host contributes.
  tensor::ContributionSource& relay_by(tensor::ContributionSender* network) {
    ends_.relay_by(network);
    relay_.relay_by(network);
    return relay_;
  }
  // `call` is called after a round has failed. It is to be set before the loop starts.
  void when_round_fails(std::function<void()> call) { ends_.when_failed = std::move(call); }

  // ---- The data path, from the sessions

  void on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed);
  void on_posting(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> header,
                  const transport::RemoteSpan& span);
  void on_written(std::uint64_t token) { ends_.on_written(token); }
  void on_landed(WorkerSession& session, std::span<const std::uint32_t> immediates) {
    ends_.on_landed(session, immediates);
  }

  // ---- Rare events

  // Lets rounds go on that have waited: grants slots beyond the windows, and grows the pool. Returns whether any did.
  bool resume();
  // Ends these partitions for a member that gives them up. From the return on nothing reads or writes its memory for
  // them, except the answers that the reply names.
  tensor::Cancelled cancel(WorkerSession& session, const tensor::Cancel& cancel);
  // Makes answers to pushes that came by `closed` go out by another connection, and to memory for which that has
  // another key.
  void reroute(const transport::DataEndpoint& closed,
               const std::function<void(transport::DataEndpoint*& data, std::uint64_t& key)>& change);
  // To be called when a session is lost, and answers to it that wait are dropped.
  void drop_answers(WorkerSession& session) { log_.note_dropped(session); }
  // Returns the ranks that are gone. Their rounds fail with fail_lost().
  GoneRanks& gone() { return gone_; }
  // Fails the rounds that cannot complete because ranks are gone. A result that is still being sent stays until it is
  // sent.
  void fail_lost();

  // ---- For people

  std::size_t open_rounds() const { return table_.open().size(); }
  // Lists the first `most` of them.
  std::vector<OpenRound> list_open(std::size_t most) const;
  // Returns the age of the oldest of them, in seconds, or 0 if none is open.
  double oldest_s() const;
  // Returns the last rounds that are over. Any thread may read them.
  const RoundRecorder& recorder() const { return table_.recorder(); }
  const std::string& last_failure() const { return ends_.last_failure(); }

 private:
  enum class Outcome : std::uint8_t { kAborted, kAnswered, kPending };

  void take(Push& push);
  Status keep(Arrival& arrival);
  void complete(Round& round);
  void sum(Round& round);
  void proceed(Round& round);
  Outcome cancel(Round& round, std::uint32_t contributor, std::uint32_t immediate, const tensor::Cancel& cancel,
                 std::vector<std::uint32_t>& missing);
  void fail_cancelled(Round& round, std::uint32_t contributor, const tensor::Cancel& cancel,
                      std::vector<std::uint32_t>& missing);
  const std::string* ask_relays(Round& round);
  std::vector<std::uint32_t> ranks_without_push(const Round& round, std::uint32_t except) const;

  const std::uint32_t epoch_;
  SlotPool& pool_;
  Counters& counters_;
  RoundGroups groups_;
  GoneRanks gone_;
  RoundTable table_;
  MemoryShares shares_;  // counts weights, and what compression has lost
  CompressedSummer compressed_;
  RedoLogTurn log_;
  RoundEnds ends_;
  RoundQueue queue_;
  RoundSums sums_;
  StoredWeights stored_;
  HostRelay relay_;
  PushAdmission admission_;
};

}  // namespace bps::server
