// SPDX-License-Identifier: Apache-2.0
// Does the relay's half of the rounds of its host. What the ranks have pushed goes out as one contribution, and what
// the servers answer is given to the ranks. tensor/host_sum.h says how it speaks to the other half.
//
// Belongs to the server loop's thread. Errors: a contribution that cannot be made fails the round, and the servers are
// told.
#pragma once

#include <algorithm>

#include "server/round_sums.h"
#include "tensor/host_sum.h"
#include "tensor/unrounded.h"

namespace bps::server {

class HostRelay final : public tensor::ContributionSource {
 public:
  // All of these must outlive it.
  HostRelay(RoundTable& table, RoundEnds& ends, RoundSums& sums, SlotPool& pool, Counters& counters)
      : table_(table), ends_(ends), sums_(sums), pool_(pool), counters_(counters) {}

  // Takes the sender to the servers. Without one this process is no relay.
  void relay_by(tensor::ContributionSender* network) { network_ = network; }
  // Returns the bytes of the longest push of a rank that can be passed on.
  std::uint64_t largest(const tensor::PushHeader& header, std::uint64_t largest_partition) const {
    if (network_ == nullptr) return 0;
    const std::uint64_t most = std::min(network_->largest(), largest_partition);
    if (!is_exact(header.op)) return most;
    return tensor::most_unrounded_elements(header.dtype, most) * size_of(header.dtype);
  }

  // To be called when all ranks of the host have pushed. Their payloads are summed when the contribution can be sent.
  void contribute(Round& round);
  // Asks the servers to cancel a contribution that is with them; they decide what becomes of it. The round may be over
  // when this returns.
  void cancel(const Round& round, const Error& why) { network_->cancel(round.token(), why); }
  // Tells the servers that this host will not contribute, so that the other hosts need not wait.
  void decline(const Round& round, const Error& why) {
    decline(round.key, round.number, round.peers.onward_server, why);
  }
  void decline(const RoundKey& key, std::uint32_t number, std::uint32_t onward_server, const Error& why);

  Status sum(std::uint32_t contribution, Dtype as, std::byte* into) override;
  void propose(std::uint32_t contribution, const std::byte* result) override;
  void deliver(std::uint32_t contribution, const std::byte* result) override;
  void fail(std::uint32_t contribution, const Error& why, std::span<const std::uint32_t> missing) override;
  void fail_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t round,
                  const Error& why) override;
  void end_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t round,
                 std::uint32_t place, const Error& why) override;

 private:
  bool fits(Round& round);
  bool keep_result(Round& round, const std::byte* result);

  RoundTable& table_;
  RoundEnds& ends_;
  RoundSums& sums_;
  SlotPool& pool_;
  Counters& counters_;
  tensor::ContributionSender* network_ = nullptr;
};

}  // namespace bps::server
