// One partition in one round: who has pushed, where the bytes lie, who waits for the result.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/slot_pool.h"
#include "tensor/push_header.h"
#include "transport/transport.h"
#include "van/membership.h"

namespace bps::server {

class WorkerSession;

// What one member of the group has said in this round.
struct Arrival {
  WorkerSession* session = nullptr;
  transport::DataEndpoint* data = nullptr;  // the push came here, and the answer goes back the same way
  tensor::PushHeader header{};
  Slot* slot = nullptr;        // the payload lies in a slot
  transport::RemoteSpan span;  // or stays in the worker's memory (length > 0)
  bool has_payload = false;
  bool pushed = false;
  bool pull_waiting = false;
  bool pulled = false;
};

struct Round {
  std::uint64_t key = 0;  // tensor and partition
  std::uint32_t number = 0;
  const van::Group* group = nullptr;
  tensor::PushHeader first{};  // what all others must agree with
  std::uint32_t pushed = 0;
  std::uint32_t pulled = 0;
  std::uint32_t writes_in_flight = 0;  // answers that still read the result slot
  bool summed = false;
  bool failed = false;
  std::string disagreement;       // why it failed
  Slot* result = nullptr;         // where later and remote pulls are answered from
  std::vector<Arrival> arrivals;  // by place in the group; keeps its capacity between uses
  Round* next_of_key = nullptr;
  std::size_t number_in_table = 0;  // for good: names the round in tokens
  std::size_t open_index = 0;       // in the table's list of open rounds
};

}  // namespace bps::server
