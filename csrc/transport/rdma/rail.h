// SPDX-License-Identifier: Apache-2.0
// Holds the user's settings of the fabric, and describes the port that a transport works on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/settings.h"
#include "transport/rdma/gid.h"
#include "transport/rdma/hca.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

struct RdmaOptions {
  HcaFilter hca;
  std::string near_gpu{};  // the PCI address of the GPU whose nearest devices are used; empty: nobody asks for that
  std::optional<unsigned> gid_index;
  std::optional<unsigned> traffic_class;
  std::optional<unsigned> service_level;
  std::optional<unsigned> pkey_index;
  unsigned timeout = 16;
  unsigned retry_count = 7;
  unsigned data_queue_pairs = 2;
  CallersMemory callers_memory = CallersMemory::kWatched;
  std::string verbs_library = "libibverbs.so.1";

  // Throws kInvalidArgument.
  static RdmaOptions from(const RdmaSettings& settings);
};

// Describes one port of one device, with the address at which it is reached. Each loop works on all rails.
struct Rail {
  std::string device;
  unsigned port = 1;
  unsigned gid_index = 0;
  bool gid_forced = false;  // by the user: it is used even where the connection manager would take another
  GidType type = GidType::kRoceV2;
  std::string address;      // numeric
  std::string interface;    // "" when unknown
  std::uint32_t speed = 0;  // in Mbit/s; 0: unknown
  std::string reason;       // why this rail was chosen, for people
};

// Writes "mlx5_0 port 1 (100 Gbit/s), GID 3: RoCE v2, ...", for people.
std::string describe(const Rail& rail);

}  // namespace bps::transport::rdma
