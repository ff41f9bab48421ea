// SPDX-License-Identifier: Apache-2.0
#include "pool/share.h"

#include <algorithm>

#include "core/error.h"
#include "core/words.h"

namespace bps::pool {
namespace {

std::string mebibytes(std::uint64_t bytes) {
  return std::to_string(bytes >> 20) + " MiB";
}

[[noreturn]] void refuse_for_ever(const std::string& what, const std::string& hint) {
  throw Error(ErrorCode::kInvalidArgument, what, hint);
}

[[noreturn]] void refuse_full(const std::string& what) {
  throw Error(ErrorCode::kTransport, "the pool is full: " + what, "wait for the end of other jobs, or ask for less");
}

}  // namespace

Limits Limits::from(const PoolSettings& settings, const Share& machine) {
  Limits limits;
  limits.all.cores = settings.cores == 0 ? machine.cores : settings.cores;
  limits.all.memory = settings.memory == 0 ? machine.memory / 4 * 3 : settings.memory;
  limits.jobs = settings.jobs;
  limits.user_jobs = settings.user_jobs == 0 ? settings.jobs : settings.user_jobs;
  limits.job.cores = settings.job_cores == 0 ? limits.all.cores : std::min(settings.job_cores, limits.all.cores);
  limits.job.memory = settings.job_memory == 0 ? limits.all.memory : std::min(settings.job_memory, limits.all.memory);
  if (limits.job.memory < kLeastMemory) {
    refuse_for_ever(
        "a job may have " + mebibytes(limits.job.memory) + " here, and a server needs " + mebibytes(kLeastMemory),
        "raise BPS_POOL_MEMORY or BPS_POOL_JOB_MEMORY");
  }
  return limits;
}

Share Limits::usual() const {
  return {.cores = std::clamp(all.cores / jobs, 1U, job.cores),
          .memory = std::clamp(all.memory / jobs, kLeastMemory, job.memory)};
}

Share grant(const Limits& limits, const Use& use, const Share& wanted, const std::string& user) {
  const Share usual = limits.usual();
  const Share share{.cores = wanted.cores == 0 ? usual.cores : wanted.cores,
                    .memory = wanted.memory == 0 ? usual.memory : wanted.memory};
  if (share.cores > limits.job.cores) {
    refuse_for_ever("a job may have " + counted(limits.job.cores, "core") + " of this pool, and this one asks for " +
                        std::to_string(share.cores),
                    "set BPS_SERVER_ENGINE_THREAD lower, or leave it out");
  }
  if (share.memory > limits.job.memory) {
    refuse_for_ever("a job may have " + mebibytes(limits.job.memory) + " of this pool, and this one asks for " +
                        mebibytes(share.memory),
                    "set BPS_SERVER_MEMORY lower, or leave it out");
  }
  if (share.memory < kLeastMemory) {
    refuse_for_ever("a server needs " + mebibytes(kLeastMemory) + ", and this job asks for " + mebibytes(share.memory),
                    "set BPS_SERVER_MEMORY higher, or leave it out");
  }
  if (use.jobs >= limits.jobs) refuse_full("it serves " + counted(use.jobs, "job") + ", which is its limit");
  if (use.user_jobs >= limits.user_jobs) {
    refuse_full("it serves " + counted(use.user_jobs, "job") + " of the user " + user + ", which is the limit");
  }
  if (share.cores > limits.all.cores - std::min(use.share.cores, limits.all.cores)) {
    refuse_full(std::to_string(use.share.cores) + " of its " + counted(limits.all.cores, "core") +
                " are taken, and the job asks for " + std::to_string(share.cores));
  }
  if (share.memory > limits.all.memory - std::min(use.share.memory, limits.all.memory)) {
    refuse_full(std::to_string(use.share.memory >> 20) + " of its " + mebibytes(limits.all.memory) +
                " are taken, and the job asks for " + mebibytes(share.memory));
  }
  return share;
}

}  // namespace bps::pool
