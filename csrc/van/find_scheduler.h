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

// A listener at the only port that will not be this job's scheduler is an error at once (another version, another
// secret), or when it has been there for some seconds (another job, another program). Otherwise throws the most
// informative error of all tries when the deadline has passed: these, or kUnreachable. Warns of what may well be the
// reason as soon as that is seen.
//
// `hint`: what to check when there is none, in terms of the variables that say where it is.
FoundScheduler find_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                              const transport::Credentials& credentials, const Deadline& deadline,
                              const std::string& hint = "");

// Tells where another scheduler of this job listens on this host, or "".
std::string find_rival(const std::vector<std::uint16_t>& ports, const transport::Credentials& credentials);

}  // namespace bps::van
