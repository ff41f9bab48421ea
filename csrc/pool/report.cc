// SPDX-License-Identifier: Apache-2.0
#include "pool/report.h"

#include "core/json.h"
#include "transport/handshake.h"

namespace bps::pool {
namespace {

using Type = MetricFamily::Type;

std::string describe_job(const Job& job) {
  const Assignment& assignment = job.assignment;
  JsonObject told;
  told.add("job", assignment.job)
      .add("user", assignment.user)
      .add("state", std::string(to_string(job.state.now())))
      .add("seconds", std::chrono::duration<double>(Clock::now() - job.since).count())
      .add("cores", assignment.share.cores)
      .add("memory", assignment.share.memory);
  if (!job.why.empty()) told.add("why", job.why);
  if (job.state.is(JobState::kEnded) || !job.process) return told.end();
  return told.add("pid", job.process->pid())
      .add("memory_used", job.process->memory())
      .add("cpu_seconds", job.process->cpu_seconds())
      .end();
}

std::string list_of(const std::list<Job>& jobs, const std::string& user, bool all) {
  JsonList list;
  for (const Job& job : jobs) {
    if (all || job.assignment.user == user) list.add_raw(describe_job(job));
  }
  return list.end();
}

}  // namespace

std::string list_for(const Jobs& jobs, const std::string& user, bool all) {
  const Use use = jobs.use_by(user);
  const Limits& limits = jobs.limits();
  double load = 0;
  (void)::getloadavg(&load, 1);
  return JsonObject()
      .add("version", std::string(BPS_VERSION))
      .add("protocol", static_cast<int>(transport::kProtocolVersion))
      .add("user", user)
      .add("cores", limits.all.cores)
      .add("cores_taken", use.share.cores)
      .add("memory", limits.all.memory)
      .add("memory_taken", use.share.memory)
      .add("most_jobs", limits.jobs)
      .add("jobs_taken", use.jobs)
      .add("load", load)
      .add_raw("jobs", list_of(jobs.all(), user, all))
      .add_raw("ended", list_of(jobs.ended(), user, all))
      .end();
}

MetricFamilies pool_families(const Jobs& jobs, const Counters& counters) {
  MetricFamilies all;
  const auto add = [&](Type type, const char* name, const char* help, auto value) {
    all.push_back({type, name, help});
    all.back().add(static_cast<double>(value));
  };
  const Use use = jobs.use_by("");
  const Limits& limits = jobs.limits();
  add(Type::kGauge, "bps_pool_jobs", "Jobs that the pool serves, or has reserved a server for.", use.jobs);
  add(Type::kGauge, "bps_pool_jobs_limit", "Jobs that the pool serves at a time.", limits.jobs);
  add(Type::kGauge, "bps_pool_cores", "Cores that jobs have.", use.share.cores);
  add(Type::kGauge, "bps_pool_cores_limit", "Cores that the pool gives to jobs.", limits.all.cores);
  add(Type::kGauge, "bps_pool_memory_bytes", "Memory that jobs may use.", use.share.memory);
  add(Type::kGauge, "bps_pool_memory_limit_bytes", "Memory that the pool gives to jobs.", limits.all.memory);
  add(Type::kCounter, "bps_pool_started_servers_total", "Servers that the pool has started.", jobs.started());
  add(Type::kCounter, "bps_pool_refused_requests_total", "Requests of users that were refused.",
      counters.refused_requests);
  add(Type::kCounter, "bps_pool_refused_connections_total", "Connections of strangers that were refused.",
      counters.refused_connections);
  MetricFamily cores{Type::kGauge, "bps_pool_job_cores", "Cores of the server of a job."};
  MetricFamily memory{Type::kGauge, "bps_pool_job_memory_bytes", "Memory that the server of a job uses."};
  MetricFamily most{Type::kGauge, "bps_pool_job_memory_limit_bytes", "Memory that the server of a job may use."};
  MetricFamily cpu{Type::kCounter, "bps_pool_job_cpu_seconds_total", "Time that the server of a job has computed."};
  for (const Job& job : jobs.all()) {
    if (!job.process) continue;
    const Labels labels{{"user", job.assignment.user}, {"job", job.assignment.job}};
    cores.add(job.assignment.share.cores, labels);
    memory.add(static_cast<double>(job.process->memory()), labels);
    most.add(static_cast<double>(job.assignment.share.memory), labels);
    cpu.add(job.process->cpu_seconds(), labels);
  }
  for (MetricFamily* family : {&cores, &memory, &most, &cpu}) all.push_back(std::move(*family));
  return all;
}

}  // namespace bps::pool
