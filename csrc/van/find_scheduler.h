// SPDX-License-Identifier: Apache-2.0
// Finds the scheduler of a job among the ports where it may listen.
//
// Several jobs may share the ports of a host, and the scheduler may start later than its nodes. So closed ports,
// unauthenticated peers and the schedulers of other jobs are skipped. The calling thread is blocked, up to the
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

// Returns a connection to the scheduler. Where there is only one port, throws at once if its listener has another
// version or another secret, and after some seconds if it belongs to another job or another program. Otherwise it tries
// until the deadline, and throws the most informative error that it has met, or kUnreachable. It warns of what may well
// be the reason as soon as it sees that.
//
// `hint` says what to check when no scheduler answers, in terms of the variables that say where it is.
FoundScheduler find_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                              const transport::Credentials& credentials, const Deadline& deadline,
                              const std::string& hint = "");

// Tells where another scheduler of this job listens on this host, or "".
std::string find_rival(const std::vector<std::uint16_t>& ports, const transport::Credentials& credentials);

}  // namespace bps::van
