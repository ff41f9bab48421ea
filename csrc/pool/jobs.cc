// SPDX-License-Identifier: Apache-2.0
#include "pool/jobs.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/hmac.h"
#include "node/secret_file.h"
#include "pool/job_settings.h"

namespace bps::pool {
namespace {

constexpr auto kLongestReservation = std::chrono::minutes(2);
constexpr auto kGrace = std::chrono::seconds(3);  // passes between SIGTERM and SIGKILL
constexpr std::size_t kMostEnded = 32;

void tell(const Job& job, const std::string& what) {
  std::fprintf(stderr, "bps-server: the server of job %s of user %s %s\n", job.assignment.job.c_str(),
               job.assignment.user.c_str(), what.c_str());
}

std::string in_words(const Share& share) {
  return std::to_string(share.cores) + (share.cores == 1 ? " core" : " cores") + " and " +
         std::to_string(share.memory >> 20) + " MiB";
}

// Refuses a name that cannot be written in logs, and read back from a line.
void check_name(const std::string& name) {
  const auto is_plain = [](char c) { return static_cast<unsigned char>(c) > 0x20 && c != 0x7f; };
  if (!name.empty() && std::ranges::all_of(name, is_plain)) return;
  throw Error(ErrorCode::kInvalidArgument, "the name of the job is empty, or has blanks in it", "set BPS_JOB_ID");
}

}  // namespace

std::string_view to_string(JobState state) {
  switch (state) {
    case JobState::kReserved: return "reserved";
    case JobState::kRunning: return "running";
    case JobState::kEnding: return "ending";
    case JobState::kEnded: return "ended";
  }
  return "?";
}

Jobs::Jobs(const Limits& limits, std::vector<int> cpus, std::string pool, std::optional<std::uint16_t> metrics)
    : limits_(limits), cpus_(std::move(cpus)), pool_(std::move(pool)), metrics_(metrics) {}

void Jobs::find() {
  for (auto& [process, assignment] : ServerProcess::find(pool_)) {
    Job& job = jobs_.emplace_back(Job{.assignment = std::move(assignment), .process = process, .was_found = true});
    job.state.enter(JobState::kRunning);
    tell(job, "(pid " + std::to_string(process.pid()) + ") runs already: it keeps " + in_words(job.assignment.share));
  }
}

const Job& Jobs::reserve(const std::string& user, const Reserve& request) {
  check_name(request.job);
  check_settings(request.settings);
  if (std::ranges::any_of(jobs_, [&](const Job& job) { return job.is_of(user, request.job); })) {
    throw Error(ErrorCode::kInvalidArgument, "the job " + request.job + " has a server of this pool already",
                "name each pool once, and give each job a name of its own (BPS_JOB_ID)");
  }
  const Share share = grant(limits_, use_by(user), {request.cores, request.memory}, user);
  Job job;
  random_bytes(std::as_writable_bytes(std::span(&job.lease, 1)));
  job.assignment = {.pool = pool_,
                    .user = user,
                    .job = request.job,
                    .share = share,
                    .cpus = choose_cpus(share.cores),
                    .seat = free_seat()};
  return jobs_.emplace_back(std::move(job));
}

void Jobs::begin(const std::string& user, const Begin& request, const std::string& secret) {
  const auto found = std::ranges::find_if(jobs_, [&](const Job& job) {
    return job.lease == request.lease && job.assignment.user == user && job.state.is(JobState::kReserved);
  });
  if (found == jobs_.end()) {
    throw Error(ErrorCode::kTimeout, "nothing is reserved for this job any more", "start the job again");
  }
  check_settings(request.settings);
  // A server without a secret would take that of this user for jobs on one host, which is not the job's.
  if (secret.size() < node::kLeastSecretBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                "the secret of the job has " + std::to_string(secret.size()) + " characters, which can be guessed",
                "use random text (openssl rand -hex 32)");
  }
  const Assignment& assignment = found->assignment;
  std::vector<std::string> variables = environment_of_server(request.settings);
  variables.push_back("BPS_SERVER_ENGINE_THREAD=" + std::to_string(std::min(assignment.share.cores, 64U)));
  variables.push_back("BPS_SERVER_MEMORY=" + std::to_string(assignment.share.memory - kOverhead));
  if (metrics_) variables.push_back("BPS_METRICS_PORT=" + std::to_string(*metrics_ + 1 + assignment.seat));
  found->process = ServerProcess::start(assignment, std::move(variables), secret);
  found->state.enter(JobState::kRunning);
  found->since = Clock::now();
  ++started_;
  tell(*found, "starts with " + in_words(assignment.share) + " (pid " + std::to_string(found->process->pid()) + ")");
}

void Jobs::cancel(std::uint64_t lease) {
  std::erase_if(jobs_, [&](const Job& job) { return job.lease == lease && job.state.is(JobState::kReserved); });
}

std::string Jobs::end(const std::string& user, const std::string& name, bool is_operator) {
  look();  // what has ended by itself a moment ago has its own reason
  std::optional<std::string> before_now;
  for (Job& job : jobs_) {
    if (job.assignment.job != name || (job.assignment.user != user && !is_operator)) continue;
    before_now = job.why;
    if (job.state.is(JobState::kRunning)) stop(job, "was ended by user " + user);
  }
  if (before_now) return *before_now;
  const auto before = std::ranges::find_if(ended_, [&](const Job& job) { return job.is_of(user, name); });
  if (before != ended_.end()) return before->why;
  throw Error(ErrorCode::kInvalidArgument, "user " + user + " has no job " + name + " here",
              "`bps pool` lists what there is");
}

void Jobs::end_all() {
  for (Job& job : jobs_) {
    if (job.state.is(JobState::kRunning)) stop(job, "ends with its pool");
  }
}

void Jobs::stop(Job& job, const std::string& why) {
  job.why = why;
  job.state.enter(JobState::kEnding);
  job.since = Clock::now();
  job.process->kill(SIGTERM);
}

void Jobs::look() {
  const auto now = Clock::now();
  for (auto at = jobs_.begin(); at != jobs_.end();) {
    const auto job = at++;
    if (job->state.is(JobState::kReserved)) {
      if (now - job->since > kLongestReservation) jobs_.erase(job);
      continue;
    }
    if (const auto how = job->process->look()) {
      note_end(job, *how);
      continue;
    }
    if (job->state.is(JobState::kEnding) && now - job->since > kGrace) job->process->kill(SIGKILL);
    const std::uint64_t most = job->assignment.share.memory;
    const std::uint64_t memory = job->process->memory();
    if (job->state.is(JobState::kRunning) && memory > most) {
      stop(*job, "is ended: it has " + std::to_string(memory >> 20) + " MiB of memory, more than the " +
                     std::to_string(most >> 20) + " MiB that it may have");
      tell(*job, job->why);
      job->process->kill(SIGKILL);  // each moment counts
    }
  }
}

void Jobs::note_end(std::list<Job>::iterator job, const std::string& how) {
  if (job->why.empty()) job->why = how;
  tell(*job, how);
  job->state.enter(JobState::kEnded);
  job->since = Clock::now();
  ended_.splice(ended_.begin(), jobs_, job);
  if (ended_.size() > kMostEnded) ended_.pop_back();
}

bool Jobs::are_running() const {
  return std::ranges::any_of(jobs_, [](const Job& job) { return !job.state.is(JobState::kReserved); });
}

Use Jobs::use_by(const std::string& user) const {
  Use use;
  for (const Job& job : jobs_) {
    use.share.cores += job.assignment.share.cores;
    use.share.memory += job.assignment.share.memory;
    ++use.jobs;
    if (job.assignment.user == user) ++use.user_jobs;
  }
  return use;
}

// Chooses the cores that the fewest servers use: as long as the pool gives no more cores than there are, each job has
// its own.
std::vector<int> Jobs::choose_cpus(std::uint32_t count) const {
  std::map<int, int> users;
  for (const Job& job : jobs_) {
    for (const int cpu : job.assignment.cpus) ++users[cpu];
  }
  std::vector<int> chosen = cpus_;
  std::ranges::stable_sort(chosen, {}, [&](int cpu) { return users[cpu]; });
  chosen.resize(std::min<std::size_t>(count, chosen.size()));
  return chosen;
}

std::uint32_t Jobs::free_seat() const {
  std::uint32_t seat = 0;
  while (std::ranges::any_of(jobs_, [&](const Job& job) { return job.assignment.seat == seat; })) ++seat;
  return seat;
}

}  // namespace bps::pool
