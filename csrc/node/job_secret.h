// SPDX-License-Identifier: Apache-2.0
// Finds the secret of a job, and decides what happens when there is none.
//
//   BPS_SECRET            the text itself
//   BPS_SECRET_FILE       a file that only this user can read
//   neither, one host     a secret of this user on this host, made at first use, in a file that only this user can read
//   neither, more hosts   refused; with BPS_INSECURE=1 the job has no secret, which is warned of
//
// A job that consists of one process makes up a secret for itself. Apart from that file nothing is changed.
#pragma once

#include <string>

#include "core/settings.h"
#include "node/startup.h"
#include "transport/handshake.h"

namespace bps::node {

struct JobSecret {
  transport::Credentials credentials;
  bool is_secret = true;  // false under BPS_INSECURE: everybody can know the key
  bool one_host = false;  // the secret belongs to this host: no other host can take part
  std::string warning;    // for people; to be logged by one process of a host
};

// Throws kInvalidArgument where the job needs a secret and has none, or where a file with one is not safe.
JobSecret job_secret(const JobSettings& settings, const Startup& startup);

// Returns the address at which a scheduler that rank 0 hosts listens; "": on all interfaces.
std::string scheduler_listens_at(const Startup& startup, const JobSecret& secret);

}  // namespace bps::node
