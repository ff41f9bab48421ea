// SPDX-License-Identifier: Apache-2.0
#include "node/job_secret.h"

#include "core/bytes.h"
#include "core/error.h"
#include "core/hmac.h"
#include "node/local_address.h"
#include "node/secret_file.h"

namespace bps::node {
namespace {

// Returns true when all processes of the job run on this host, as far as this one can tell. Where it is mistaken,
// processes of other hosts find that they have no secret, and are refused.
bool is_on_one_host(const JobSettings& settings, const Startup& startup) {
  if (is_loopback(startup.scheduler_host)) return true;
  // torchrun says how many processes there are on each host.
  if (startup.joint && settings.local_size && *settings.local_size < startup.workers) return false;
  return is_of_this_host(startup.scheduler_host);
}

JobSecret from(const Startup& startup, const std::string& secret) {
  JobSecret found{.credentials = transport::Credentials::from(startup.job, secret), .warning = ""};
  return found;
}

JobSecret random_secret(const Startup& startup) {
  Digest bytes;
  random_bytes(bytes);
  JobSecret found = from(startup, std::string(as_text(bytes)));
  found.one_host = true;
  return found;
}

}  // namespace

JobSecret job_secret(const JobSettings& settings, const Startup& startup) {
  if (startup.hosts_scheduler && startup.workers == 1) return random_secret(startup);
  if (!settings.secret.empty()) {
    JobSecret found = from(startup, settings.secret);
    if (settings.secret.size() < kLeastSecretBytes) {
      found.warning = "BPS_SECRET has " + std::to_string(settings.secret.size()) +
                      " characters, which can be guessed: use random text (openssl rand -hex 32)";
    }
    return found;
  }
  if (!settings.secret_file.empty()) return from(startup, read_secret_file(settings.secret_file));
  if (settings.insecure) {
    JobSecret found = from(startup, "");
    found.is_secret = false;
    found.warning =
        "BPS_INSECURE=1: this job has no secret; everybody who reaches its ports can join it, read and change its "
        "gradients";
    return found;
  }
  if (is_on_one_host(settings, startup)) {
    JobSecret found = from(startup, host_secret());
    found.one_host = true;
    return found;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "this job runs on several hosts (its scheduler is at " + startup.scheduler_host +
                  ") and has no secret: everybody in the network could join it",
              "make one (openssl rand -hex 32 > FILE; chmod 600 FILE), copy it to all hosts, and set "
              "BPS_SECRET_FILE=FILE everywhere, or BPS_SECRET to its text; BPS_INSECURE=1 starts without a secret");
}

std::string scheduler_listens_at(const Startup& startup, const JobSecret& secret) {
  return secret.one_host || is_loopback(startup.scheduler_host) ? "127.0.0.1" : "";
}

}  // namespace bps::node
