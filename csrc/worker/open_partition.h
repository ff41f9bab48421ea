// SPDX-License-Identifier: Apache-2.0
// Describes a partition that a worker loop has not finished, for people: what it belongs to and what it waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bps::worker {

class Connections;
class DeviceCopies;
class InFlightTable;

struct OpenPartition {
  std::string operation;  // "push_pull of 'name', round 3"; empty: this host's contribution, which a relay sends
  std::string name;       // the name of the tensor; empty likewise
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  std::uint32_t partition = 0;
  std::string server;
  enum class Waits {
    kForAnswer,  // it has been sent
    kForCredit,  // or until its turn comes
    kForDevice,  // a GPU has not copied what is to be sent, or a result
  };
  Waits waits = Waits::kForCredit;
  int left_ms = 0;            // until the deadline of the operation; 0 for a contribution
  std::int64_t since_ms = 0;  // since it began
};

// Lists partitions that are not finished, at most so many: first those that were sent.
std::vector<OpenPartition> list_open(const InFlightTable& sent, const Connections& connections,
                                     const DeviceCopies& copies, std::size_t most);

}  // namespace bps::worker
