// SPDX-License-Identifier: Apache-2.0
// Sends a host's contributions to the servers (tensor/host_sum.h), where this process is the relay of its host. Belongs
// to the loop's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "core/metrics.h"
#include "tensor/host_sum.h"
#include "worker/cancellation.h"
#include "worker/connections.h"
#include "worker/host_contribution.h"

namespace bps::worker {

class RelaySender final : public tensor::ContributionSender {
 public:
  RelaySender(std::uint64_t largest_partition, Connections& connections, Cancellation& cancellation,
              HostContributions& contributions, Counters& counters)
      : largest_partition_(largest_partition),
        connections_(connections),
        cancellation_(cancellation),
        contributions_(contributions),
        counters_(counters) {}

  // Makes contributions to this tensor travel compressed.
  void add_compressed(const std::shared_ptr<const Tensor>& tensor) {
    compressed_[{tensor->group->id, tensor->id}] = tensor;
  }

  // The rounds of this host call these.
  std::uint64_t largest() const override { return largest_partition_; }
  void contribute(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                  std::uint32_t place) override;
  void cancel(std::uint32_t number, const Error& why) override;
  void note_landed(std::uint32_t number) override;
  void refuse(const tensor::PushHeader& header, std::uint32_t place, const Error& why) override;

 private:
  const std::uint64_t largest_partition_;
  Connections& connections_;
  Cancellation& cancellation_;
  HostContributions& contributions_;
  Counters& counters_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::shared_ptr<const Tensor>> compressed_;  // by group and id
};

}  // namespace bps::worker
