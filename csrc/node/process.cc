// SPDX-License-Identifier: Apache-2.0
#include "node/process.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "core/interrupt.h"
#include "core/log.h"
#include "core/unknown_settings.h"
#include "node/connector.h"
#include "node/listeners.h"
#include "node/local_address.h"
#include "node/loops.h"
#include "node/tcp_rails.h"
#include "node/trace.h"
#include "transport/shm/shared_memory.h"
#include "van/find_scheduler.h"
#include "van/scheduler.h"
#include "van/select.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

constexpr double kVerdict_s = 1;  // of the scheduler, after the heartbeat's time-out
constexpr double kLook_s = 0.02;

Startup startup_after(const Startup& before, const van::Node& self) {
  Startup startup = before;
  startup.worker_rank = self.worker_rank;
  startup.server_rank = self.server_rank;
  return startup;
}

std::uint64_t new_identity() {
  std::uint64_t identity = 0;
  random_bytes(std::as_writable_bytes(std::span(&identity, 1)));
  return identity;
}

}  // namespace

std::unique_ptr<Process> Process::start(const Settings& settings, const Startup& startup) {
  return bring_up(std::unique_ptr<Process>(new Process(settings, startup)), nullptr);
}

std::unique_ptr<Process> Process::renew(Process& ended) {
  ended.retire();
  auto next = bring_up(std::unique_ptr<Process>(new Process(ended)), &ended);
  next->ended_trace_ = std::move(ended.ended_trace_);  // a long one takes seconds, for which no view waits
  ended.take_down();                                   // only now: it has shown the scheduler that this process lives
  return next;
}

// A member that is lost meanwhile may end the view before it has begun here.
std::unique_ptr<Process> Process::bring_up(std::unique_ptr<Process> process, const Process* before) {
  std::unique_ptr<Process> ended;
  for (;;) {
    try {
      const InterruptScope scope([&] { process->check_view(before); });
      process->bring_up(before);
      return process;
    } catch (const Error&) {
      if (!process->awaits_next_view()) throw;
    }
    process->retire();
    std::unique_ptr<Process> next(new Process(*process));
    ended = std::exchange(process, std::move(next));
    before = ended.get();
  }
}

// A peer that could not be reached may be a member whose loss the scheduler has not told yet.
bool Process::awaits_next_view() const {
  if (!van_ || !van_->joined()) return false;
  if (van_->view_ended()) return true;
  if (options_.settings.job.min_workers == 0) return false;
  const Deadline verdict = Deadline::after(options_.settings.deadlines.heartbeat + kVerdict_s);
  while (!van_->view_ended() && (!verdict.passed() || van_->awaits_scheduler())) sleep_until(Deadline::after(kLook_s));
  return van_->view_ended();
}

// Throws when the view that this process joins, or is in, is not to be. Once it has joined, the scheduler speaks to it
// and no more to what it was before.
void Process::check_view(const Process* before) const {
  const bool has_joined = van_ && van_->joined();
  if (before != nullptr && !has_joined) before->van_->require_next_view();
  if (has_joined && van_->view_ended()) throw Error(ErrorCode::kRoundAborted, "the view has ended", van::kRepeat);
}

Process::Process(const Settings& settings, const Startup& startup)
    : options_(settings, startup), secret_(job_secret(options_.settings.job, startup)), identity_(new_identity()) {}

Process::Process(Process& ended)
    : options_(ended.options_.settings, startup_after(ended.options_.startup, ended.van_->self())),
      secret_(ended.secret_),
      renews_(ended.van_->self().id),
      resume_patience_s_(ended.van_->resume_patience_s()),
      identity_(ended.identity_),
      scheduler_(std::move(ended.scheduler_)) {}

Process::~Process() {
  take_down();
}

void Process::bring_up(const Process* before) {
  set_log(options_.settings.log_level, "pid " + std::to_string(::getpid()));
  if (options_.settings.job.local_rank.value_or(0) == 0) {
    log_unknown_settings();
    if (!secret_.warning.empty()) log_warning(secret_.warning);
  }
  if (const int error = transport::shm::SharedMemory::why_unavailable(); error != 0) {
    log_warning(std::string("no process of this host shares memory with this one (memfd_create: ") +
                std::strerror(error) + "): TCP is used in its place");
  }
  if (options_.startup.hosts_scheduler && !scheduler_) make_scheduler();
  make_van();
  trace_ = make_trace(options_.settings.trace);
  loops_ = std::make_unique<Loops>(options_, tcp_rails(), view_credentials_, trace_.get());
  listen();
  inspect();
  van_->join(describe_self(), options_.startup.workers, options_.startup.servers);
  if (before != nullptr) before->van_->retire();
  set_log(options_.settings.log_level, van_->self().describe());
  hosts_ = van::Hosts(van_->membership());
  start_servers();
  if (options_.startup.is_worker()) make_worker();
  serve_metrics();
  if (trace_) start_trace();
}

// Begins before the process joins: whom a start waits for is worth knowing, too.
void Process::inspect() {
  auto inspection =
      std::make_unique<Inspection>(Inspection::Source{.report = [this](bool with_stacks) { return dump(with_stacks); },
                                                      .job = [this](bool with_stacks) { return dump_job(with_stacks); },
                                                      .reply = [this](const van::Reply& reply) { van_->reply(reply); },
                                                      .write_file = [this](Failure failure) { write_dump(failure); }});
  const std::lock_guard lock(inspection_mutex_);
  inspection_ = std::move(inspection);
}

// Servers are reached by everybody, the relays of a host by its ranks.
void Process::listen() {
  const auto enter = [this](transport::Kind kind, std::unique_ptr<transport::IncomingConnection> incoming) {
    loops_->accept(kind, std::move(incoming));
  };
  if (options_.startup.is_server()) {
    listeners_ = std::make_unique<Listeners>(loops_->tcp_rails(), loops_->rails(), enter);
  } else if (options_.sums_on_host()) {
    listeners_ = std::make_unique<Listeners>(enter);
  }
}

void Process::start_servers() {
  if (options_.startup.is_server() || hosts_.active()) {
    loops_->start_servers(
        van_->membership(), van_->self(),
        [this](std::uint32_t node, const std::string& why) { lose_connection(node, why); },
        [this] { note_failure(Failure::kOfRound); });
  } else {
    listeners_.reset();
  }
}

void Process::make_scheduler() {
  const Startup& startup = options_.startup;
  van::SchedulerOptions options;
  options.ports = startup.scheduler_ports;
  options.workers = startup.workers;
  options.servers = startup.servers;
  options.heartbeat_timeout_s = options_.settings.deadlines.heartbeat;
  options.join_timeout_s = options_.settings.deadlines.join;
  options.balanced = options_.key_hash == tensor::KeyHash::kBalanced;
  options.cut = options_.cut;
  options.min_workers = options_.settings.job.min_workers;
  options.address = scheduler_listens_at(startup, secret_);
  options.origin = startup.origin;
  std::vector<std::uint16_t> others = startup.scheduler_ports;
  try {
    scheduler_ = std::make_unique<van::Scheduler>(options, secret_.credentials);
    std::erase(others, scheduler_->port());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPortTaken || van::find_rival(others, secret_.credentials).empty()) throw;
  }
  // Ranks that look for one of two schedulers of this name would find either.
  if (const std::string where = van::find_rival(others, secret_.credentials); !where.empty()) {
    scheduler_.reset();
    throw Error(
        ErrorCode::kMismatch,
        "another process with rank 0 of the job '" + startup.job + "' runs on this host, its scheduler at " + where,
        "give each job a MASTER_PORT or BPS_JOB_ID of its own, and each process a rank; end processes that are "
        "left over");
  }
}

void Process::make_van() {
  van::VanOptions options;
  options.scheduler_host = options_.startup.scheduler_host;
  // Without the network, whichever of this host's names its ranks were told.
  if (is_hosted_by_rank_0() && (secret_.one_host || is_of_this_host(options.scheduler_host))) {
    options.scheduler_host = "127.0.0.1";
  }
  options.scheduler_hint = options_.startup.scheduler_hint;
  options.origin = options_.startup.origin;
  options.scheduler_ports = options_.startup.scheduler_ports;
  if (scheduler_) options.scheduler_ports = {scheduler_->port()};
  // The members of a view that has ended come when they call the next operation.
  options.join_timeout_s = renews_ != 0 ? options_.settings.deadlines.operation : options_.settings.deadlines.join;
  if (resume_patience_s_ > 0) options.join_timeout_s = resume_patience_s_;
  options.renews = renews_;
  options.heartbeat_timeout_s = options_.settings.deadlines.heartbeat;
  options.outlives_scheduler = options_.settings.job.min_workers > 0 && !is_hosted_by_rank_0();
  options.scheduler_patience_s = options_.settings.deadlines.scheduler;
  van_ = std::make_unique<van::Van>(options, secret_.credentials, events());
}

// Peers of one host need no interface but loopback, unless the settings name one.
std::vector<transport::tcp::TcpRail> Process::tcp_rails() const {
  const TransportSettings& settings = options_.settings.transport;
  if (secret_.one_host && settings.node_host.empty() && settings.interface.empty()) return {{"127.0.0.1", "lo", 0}};
  return find_tcp_rails(settings, options_.startup.scheduler_host);
}

van::Node Process::describe_self() const {
  van::Node self;
  self.worker_rank = options_.startup.worker_rank;
  self.server_rank = options_.startup.server_rank;
  self.worker_loops = static_cast<std::uint16_t>(options_.worker_loops);
  self.server_loops = static_cast<std::uint16_t>(options_.server_loops);
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.identity = identity_;
  self.host = host_name();
  self.host_key = van::host_key(options_.settings.transport.host_id);
  self.sums_on_host = options_.sums_on_host();
  self.has_state = options_.startup.is_worker() && (renews_ != 0 || options_.startup.resumes);
  if (listeners_) self.addresses = listeners_->addresses();
  if (!options_.startup.is_server() && !loops_->rails().empty()) {
    // Nobody connects to a worker by it, but servers of the same fabric are reached by RDMA only if it has RDMA too.
    self.addresses.push_back({std::string(transport::to_string(transport::Kind::kRdma)), {}});
  }
  return self;
}

van::VanEvents Process::events() {
  return {
      .on_view = [this](const transport::View& view) { use(view); },
      .on_lost = [this](std::uint32_t node, const std::string& why) { lose_node(node, why); },
      .on_left = [this](std::uint32_t node, const std::string& why) { leave_node(node, why); },
      .on_reachable =
          [this](std::uint32_t node) {
            const std::lock_guard lock(mutex_);
            if (worker_) worker_->on_reachable(node);
          },
      .on_view_ended = [this](const std::string& why) { end_view(why); },
      .on_question =
          [this](const van::Question& question) {
            const std::lock_guard lock(inspection_mutex_);
            if (inspection_) inspection_->ask(question);
          },
      .on_group =
          [this](const van::Group& group, std::function<void()> known) {
            const std::lock_guard lock(mutex_);
            if (loops_) loops_->add_group(group, std::move(known));
          },
      .on_tensor_failed =
          [this](std::uint32_t tensor, const std::string& why) {
            const std::lock_guard lock(mutex_);
            if (worker_) worker_->fail_tensor(tensor, why);
          },
      .find_stuck =
          [this] {
            const std::lock_guard lock(mutex_);
            return loops_ ? loops_->find_stuck() : "";
          },
      .is_in_use =
          [this] {
            const std::lock_guard lock(mutex_);
            return loops_ && loops_->serves();
          },
  };
}

// On the van's thread. A process of an earlier run of this job has other credentials from here on.
void Process::use(const transport::View& view) {
  const std::lock_guard lock(mutex_);
  view_credentials_ = secret_.credentials.of(view);
  incarnation_ = view.incarnation;
  if (listeners_) listeners_->use(view_credentials_);
}

// The scheduler: where servers are counted it is a process of its own.
bool Process::is_hosted_by_rank_0() const {
  return options_.startup.joint && !options_.settings.job.servers;
}

void Process::lose_node(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (options_.startup.is_worker() && !worker_ && !leaving_) {
    early_events_.push_back({node, why, true});
    return;
  }
  if (worker_ && !leaving_) {
    const bool host_lost = node == 0 && is_hosted_by_rank_0();
    worker_->lose_node(node, host_lost ? why + "; " + membership().worker(0)->describe() + " hosts it" : why);
  }
  if (node != 0 && loops_) loops_->lose_node(node, why);
}

void Process::leave_node(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (options_.startup.is_worker() && !worker_ && !leaving_) {
    early_events_.push_back({node, why, false});
    return;
  }
  if (worker_ && !leaving_) worker_->leave_node(node, why);
  if (loops_) loops_->leave_node(node, why);
}

void Process::end_view(const std::string& why) {
  const std::lock_guard lock(mutex_);
  const Error error(ErrorCode::kRoundAborted, why, van::kRepeat);
  if (loops_) loops_->end_view(error);
  if (worker_) worker_->end_view(error);
}

void Process::lose_connection(std::uint32_t node, const std::string& why) {
  if (!leaving_) van_->suspect(node, why);
}

worker::Worker& Process::worker() {
  if (!worker_) {
    throw Error(ErrorCode::kInvalidArgument, "this process is a server, not a worker", "call this on workers only");
  }
  return *worker_;
}

const van::Membership& Process::membership() const {
  return van_->membership();
}

bool Process::view_ended() {
  const std::lock_guard lock(mutex_);
  return van_->view_ended() || (worker_ && worker_->view_ended());
}

std::vector<std::string> Process::routes() const {
  std::vector<std::string> names;
  if (!connector_) return names;
  for (const transport::Kind kind : connector_->routes()) names.emplace_back(transport::to_string(kind));
  return names;
}

}  // namespace bps::node
