// SPDX-License-Identifier: Apache-2.0
#include "worker/open_partition.h"

#include <set>

#include "worker/connections.h"
#include "worker/device_copies.h"
#include "worker/in_flight.h"
#include "worker/operation.h"

namespace bps::worker {
namespace {

OpenPartition describe(const Transfer& transfer, const Part& part, const ServerConnection& server, bool is_sent) {
  OpenPartition one;
  one.group = transfer.header->group;
  one.tensor = transfer.header->tensor;
  one.round = transfer.header->round;
  one.partition = part.partition;
  one.server = server.name;
  one.is_sent = is_sent;
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
  std::vector<OpenPartition> list;
  for (std::uint32_t i = 0; i < sent.size() && list.size() < most; ++i) {
    const InFlight& entry = sent[i];
    if (entry.transfer != nullptr) list.push_back(describe(*entry.transfer, entry.part, *entry.server, true));
  }
  std::set<const Transfer*> seen;  // a transfer whose partitions a device fills is in several places
  const auto add = [&](const Transfer& transfer, const ServerConnection& server) {
    if (!seen.insert(&transfer).second) return;
    for (const Part& part : transfer.parts.subspan(transfer.next)) {
      if (list.size() == most) return;
      list.push_back(describe(transfer, part, server, false));
    }
  };
  for (const ServerConnection* server : connections.all()) {
    for (const Transfer* transfer : server->queue.all()) add(*transfer, *server);
    for (const Transfer* transfer : server->fetching.all()) add(*transfer, *server);
    copies.for_each_fetching(*server, [&](const Transfer& transfer) { add(transfer, *server); });
  }
  return list;
}

}  // namespace bps::worker
