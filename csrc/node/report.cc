// SPDX-License-Identifier: Apache-2.0
#include "node/report.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <string>

#include "core/json.h"
#include "node/describe_placement.h"
#include "node/local_address.h"
#include "node/stacks.h"
#include "node/view.h"
#include "van/ask_scheduler.h"
#include "van/pending_calls.h"
#include "van/server_weights.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

constexpr double kPatienceForState_s = 0.5;
constexpr double kPatienceForJob_s = 1.0;  // a report with stacks takes 0.9 s at most
constexpr std::size_t kMostPerLoop = 256;
constexpr std::size_t kMostRecent = 64;

std::string name_of(worker::OpenPartition::Waits waits) {
  using Waits = worker::OpenPartition::Waits;
  switch (waits) {
    case Waits::kForAnswer: return "answer";
    case Waits::kForCredit: return "credit";
    case Waits::kForDevice: return "gpu";
  }
  return "";
}

std::string to_json(const worker::OpenPartition& one) {
  JsonObject object;
  object.add("operation", one.operation).add("name", one.name).add("group", one.group).add("tensor", one.tensor);
  object.add("round", one.round).add("partition", one.partition).add("server", one.server);
  object.add("waits_for", name_of(one.waits));
  return object.add("since_ms", one.since_ms).add("left_ms", one.left_ms).end();
}

std::string name_of(server::OpenRound::Waits waits) {
  using Waits = server::OpenRound::Waits;
  switch (waits) {
    case Waits::kForPushes: return "pushes";
    case Waits::kForNetwork: return "network";
    case Waits::kForAnswers: return "answers";
    case Waits::kForMembers: return "members";
  }
  return "";
}

std::string to_json(const server::OpenRound& one) {
  JsonList missing;
  for (const std::uint32_t rank : one.missing) missing.add(rank);
  JsonObject object;
  object.add("group", one.key.group).add("tensor", one.key.tensor).add("partition", one.key.partition);
  object.add("round", one.number).add("for_host", one.key.for_host).add("waits_for", name_of(one.waits));
  return object.add("since_ms", one.since_ms).add_raw("missing", missing.end()).end();
}

// Writes `age_ms`, the time since the round began, and the other times from its beginning on.
std::string to_json(const server::RoundRecorder::Record& one) {
  const auto ms = [](std::uint64_t from, std::uint64_t to) {
    return static_cast<std::int64_t>((to - from) / 1'000'000);
  };
  JsonObject object;
  object.add("group", one.key.group).add("tensor", one.key.tensor).add("partition", one.key.partition);
  object.add("round", one.number).add("for_host", one.key.for_host).add("bytes", one.bytes);
  object.add("state", std::string(one.failed ? "failed" : "done")).add("last_rank", one.last_rank);
  object.add("age_ms", ms(one.opened, coarse_now_ns()));
  object.add("summed_ms", one.summed == 0 ? -1 : ms(one.opened, one.summed));
  return object.add("ended_ms", ms(one.opened, one.ended)).end();
}

std::string to_json(const worker::FlightRecorder::Record& one) {
  using End = worker::FlightRecorder::End;
  const worker::Tensor& tensor = *one.tensor;
  JsonObject object;
  object.add("kind", std::string(worker::name_of(one.kind))).add("name", tensor.name).add("tensor", tensor.id);
  object.add("group", tensor.group->id).add("dtype", std::string(to_string(tensor.dtype))).add("bytes", tensor.bytes);
  const char* state = one.end == End::kNone ? "open" : one.end == End::kDone ? "done" : "failed";
  object.add("round", one.round).add("age_ms", one.age_ms);
  return object.add("state", std::string(state)).add("duration_us", one.duration_us).end();
}

std::string groups_of(const std::vector<worker::FlightRecorder::Record>& operations) {
  std::map<std::uint32_t, const van::Group*> groups;
  for (const auto& one : operations) groups.emplace(one.tensor->group->id, one.tensor->group.get());
  JsonList list;
  for (const auto& [id, group] : groups) {
    JsonList ranks;
    for (const std::uint32_t rank : group->ranks) ranks.add(rank);
    list.add_raw(JsonObject().add("id", id).add_raw("ranks", ranks.end()).end());
  }
  return list.end();
}

std::string usage() {
  rusage used{};
  (void)::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) { return time.tv_sec * 1000 + time.tv_usec / 1000; };
  long pages = 0;
  if (std::FILE* const file = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
    (void)std::fclose(file);
  }
  JsonObject object;
  object.add("cpu_ms", seconds(used.ru_utime) + seconds(used.ru_stime));
  return object.add("memory_bytes", pages * ::sysconf(_SC_PAGESIZE)).end();
}

std::string describe_loops(const std::vector<Loops::OpenState>& states, JsonObject& into) {
  JsonList loops;
  JsonList operations;
  JsonList rounds;
  std::string last_failed_round;
  bool needs_credits = false;
  std::uint64_t credits = 0;
  for (const Loops::OpenState& state : states) {
    JsonObject loop;
    loop.add("name", state.loop).add("answered", state.answered).add("open_rounds", state.rounds);
    loops.add_raw(loop.end());
    for (const worker::WorkerUsage::Server& one : state.worker.servers) {
      needs_credits |= one.needs_slots;
      if (one.needs_slots) credits += one.small_slots + one.large_slots;
    }
    for (const worker::OpenPartition& one : state.partitions) operations.add_raw(to_json(one));
    for (const server::OpenRound& one : state.listed) rounds.add_raw(to_json(one));
    if (!state.last_failed_round.empty()) last_failed_round = state.last_failed_round;
  }
  into.add_raw("operations", operations.end()).add_raw("rounds", rounds.end());
  into.add("last_failed_round", last_failed_round);
  if (needs_credits) into.add("credits", credits);
  return loops.end();
}

}  // namespace

std::string Report::describe_job() const {
  JsonObject job;
  char incarnation[17];
  (void)std::snprintf(incarnation, sizeof incarnation, "%016llx", static_cast<unsigned long long>(incarnation_));
  job.add("id", options_.startup.job).add("incarnation", std::string(incarnation));
  job.add("scheduler", options_.startup.scheduler_host).add("why_scheduler_lost", van_.end().why_scheduler_lost());
  if (!van_.joined()) return job.add("joined", false).end();
  const van::Membership& members = van_.membership();
  job.add("joined", true).add("epoch", members.epoch).add("workers", members.workers).add("servers", members.servers);
  return job.end();
}

// Returns the members, with the links that weights follow.
van::Membership Report::members() const {
  const worker::Worker* const worker = view_.worker();
  return worker != nullptr ? worker->planner().membership() : van_.membership();
}

std::string Report::describe_members() const {
  JsonList list;
  const worker::Worker* const worker = view_.worker();
  const van::Membership members = this->members();
  const auto weights = van::ServerWeights::of_job(members, van::Hosts(members));
  const std::vector<std::uint32_t> shares = weights ? weights->of(members.all()) : std::vector<std::uint32_t>();
  const worker::Deal deal = worker != nullptr ? worker->deal() : worker::Deal{};
  for (const van::Node& node : members.nodes) {
    JsonObject one;
    one.add("node", node.id).add("rank", node.worker_rank).add("server_rank", node.server_rank);
    one.add("link_gbps", static_cast<double>(node.link) * 8 / 1e9);
    one.add("sum_gbps", static_cast<double>(node.sum_rate) * 8 / 1e9);
    const auto server = static_cast<std::size_t>(node.server_rank);
    if (node.server_rank >= 0 && weights) one.add("share", shares[server] / double{van::ServerWeights::kAll});
    if (node.server_rank >= 0 && worker != nullptr) {
      one.add("dealt_bytes", deal.bytes[server])
          .add("due_bytes", static_cast<std::uint64_t>(std::llround(deal.due[server])));
    }
    list.add_raw(one.add("host", node.host).add("pid", node.pid).end());
  }
  return list.end();
}

std::string Report::dump(bool with_stacks) const {
  JsonObject object;
  object.add("version", std::string(BPS_VERSION)).add("pid", ::getpid()).add("host", host_name());
  object.add_raw("job", describe_job());
  if (van_.joined()) {
    const van::Node& self = van_.self();
    object.add("node", self.id).add("rank", self.worker_rank).add("server_rank", self.server_rank);
    object.add_raw("members", describe_members()).add_raw("placement", describe_placement(members()));
  }
  JsonList calls;
  for (const van::WaitingCall& call : van_.waiting_calls()) {
    calls.add_raw(JsonObject().add("what", call.what).add("since_ms", call.since_ms).end());
  }
  object.add_raw("calls", calls.end());
  object.add_raw("loops",
                 describe_loops(view_.loops().open_state(kMostPerLoop, Deadline::after(kPatienceForState_s)), object));
  JsonList recent;
  std::string groups = "[]";  // the groups of these operations
  std::string last_failure;
  if (const worker::Worker* const worker = view_.worker()) {
    const auto operations = worker->recent(kMostRecent);
    for (const auto& one : operations) recent.add_raw(to_json(one));
    groups = groups_of(operations);
    last_failure = worker->last_failure();
  }
  JsonObject counters;
  for (const auto& [name, count] : view_.loops().counters()) counters.add(name, count);
  JsonList recent_rounds;
  for (const auto& one : view_.loops().recent_rounds(kMostRecent)) recent_rounds.add_raw(to_json(one));
  object.add("last_failure", last_failure)
      .add_raw("recent_rounds", recent_rounds.end())
      .add_raw("recent", recent.end())
      .add_raw("groups", groups)
      .add_raw("counters", counters.end())
      .add_raw("usage", usage());
  if (with_stacks) object.add("stacks", stacks());
  return object.end();
}

std::string Report::dump_job(bool with_stacks) const {
  const van::JobState state = van::ask_scheduler(van_.options().scheduler_host, van_.options().scheduler_ports,
                                                 credentials_, with_stacks, Deadline::after(kPatienceForJob_s));
  JsonList members;
  for (const auto& [node, report] : state.told) members.add_raw(report);
  return JsonObject().add_raw("scheduler", state.scheduler).add_raw("members", members.end()).end();
}

}  // namespace bps::node
