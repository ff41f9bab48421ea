// SPDX-License-Identifier: Apache-2.0
// The secret of a job: where it comes from, and what happens when there is none.
//
//   BPS_SECRET            the text itself
//   BPS_SECRET_FILE       a file that only this user can read
//   neither, one host     a secret of this user on this host, made at first use, in a file that only this user can read
//   neither, more hosts   refused; with BPS_INSECURE=1 the job has no secret, which is warned of
//
// A job that consists of one process makes up a secret for itself. Pure of side effects except for that file.
#pragma once

#include <string>

#include "core/settings.h"
#include "node/startup.h"
#include "transport/handshake.h"

namespace bps::node {

struct JobSecret {
  transport::Credentials credentials;
  bool is_secret = true;  // false under BPS_INSECURE: everybody can know the key
  bool one_host = false;  // the secret is of this host: no other one can take part
  std::string warning;    // for people; to be logged by one process of a host
};

// Throws kInvalidArgument where the job needs a secret and has none, or where a file with one is not safe.
JobSecret job_secret(const JobSettings& settings, const Startup& startup);

// The address at which a scheduler that rank 0 hosts listens; "": on all interfaces.
std::string scheduler_listens_at(const Startup& startup, const JobSecret& secret);

}  // namespace bps::node
