// SPDX-License-Identifier: Apache-2.0
// Finding the scheduler of a job among the ports where it may listen.
//
// Several jobs may share the ports of a host, and the scheduler may start later than its nodes: closed ports,
// unauthenticated peers and the schedulers of other jobs are skipped. Blocks the calling thread, up to the
// deadline.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/fd.h"
#include "transport/handshake.h"

namespace bps::van {

struct FoundScheduler {
  Fd socket;                   // authenticated
  transport::Session session;  // the connection's key, and the view that the scheduler tells
  std::string where;           // "host:port"
};

// Throws the most informative error of all tries: kVersion and kAuthentication (wrong secret) at once if there is one
// port only; these, kAuthentication (only other jobs there) or kUnreachable when the deadline has passed.
FoundScheduler find_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                              const transport::Credentials& credentials, const Deadline& deadline);

}  // namespace bps::van
