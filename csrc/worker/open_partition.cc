// SPDX-License-Identifier: Apache-2.0
#include "worker/open_partition.h"

#include <set>

#include "worker/connections.h"
#include "worker/device_copies.h"
#include "worker/in_flight.h"
#include "worker/operation.h"

namespace bps::worker {
namespace {

OpenPartition describe(const Transfer& transfer, const Part& part, const ServerConnection& server,
                       OpenPartition::Waits waits) {
  OpenPartition one;
  one.group = transfer.header->group;
  one.tensor = transfer.header->tensor;
  one.round = transfer.header->round;
  one.partition = part.partition;
  one.server = server.name;
  one.waits = waits;
  if (transfer.operation == nullptr) return one;
  one.operation = transfer.operation->describe();
  one.name = transfer.operation->tensor->name;
  one.left_ms = transfer.operation->deadline.left_ms();
  one.since_ms = transfer.operation->age_ms();
  return one;
}

}  // namespace

std::vector<OpenPartition> list_open(const InFlightTable& sent, const Connections& connections,
                                     const DeviceCopies& copies, std::size_t most) {
  using Waits = OpenPartition::Waits;
  std::vector<OpenPartition> list;
  for (std::uint32_t i = 0; i < sent.size() && list.size() < most; ++i) {
    const InFlight& entry = sent[i];
    if (entry.transfer == nullptr) continue;
    const Waits waits = entry.is_copying() ? Waits::kForDevice : Waits::kForAnswer;
    list.push_back(describe(*entry.transfer, entry.part, *entry.server, waits));
  }
  std::set<const Transfer*> seen;  // a transfer whose partitions a device fills is in several places
  const auto add = [&](const Transfer& transfer, const ServerConnection& server, Waits waits) {
    if (!seen.insert(&transfer).second) return;
    for (const Part& part : transfer.parts.subspan(transfer.next)) {
      if (list.size() == most) return;
      list.push_back(describe(transfer, part, server, waits));
    }
  };
  for (const ServerConnection* server : connections.all()) {
    copies.for_each_fetching(*server, [&](const Transfer& transfer) { add(transfer, *server, Waits::kForDevice); });
    for (const Transfer* transfer : server->queue.all()) add(*transfer, *server, Waits::kForCredit);
    for (const Transfer* transfer : server->fetching.all()) add(*transfer, *server, Waits::kForCredit);
  }
  return list;
}

}  // namespace bps::worker
