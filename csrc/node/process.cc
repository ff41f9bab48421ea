// SPDX-License-Identifier: Apache-2.0
#include "node/process.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "core/interrupt.h"
#include "core/log.h"
#include "core/unknown_settings.h"
#include "node/hosted_scheduler.h"
#include "node/trace.h"
#include "node/view.h"
#include "transport/shm/shared_memory.h"
#include "van/scheduler.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

constexpr double kVerdict_s = 1;  // of the scheduler, after the heartbeat's time-out
constexpr double kLook_s = 0.02;

Startup startup_after(const Startup& before, const van::Node& self) {
  Startup startup = before;
  startup.worker_rank = self.worker_rank;
  if (startup.is_server()) startup.server_rank = self.server_rank;  // not that of a worker which may serve
  return startup;
}

bool may_follow_from_a_loss(ErrorCode code) {
  return code == ErrorCode::kUnreachable || code == ErrorCode::kTransport || code == ErrorCode::kTimeout;
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
    } catch (const Error& error) {
      if (!process->awaits_next_view()) {
        if (may_follow_from_a_loss(error.code())) process->require_no_loss();
        throw;
      }
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
  if (van_->end().view_ended()) return true;
  if (options_.settings.job.min_workers == 0) return false;
  const Deadline verdict = Deadline::after(options_.settings.deadlines.heartbeat + kVerdict_s);
  while (!van_->end().view_ended() && (!verdict.passed() || van_->awaits_scheduler()))
    sleep_until(Deadline::after(kLook_s));
  return van_->end().view_ended();
}

// The loss of a member says more than what followed from it here.
void Process::require_no_loss() const {
  const std::string loss = van_ ? van_->end().first_loss().why : "";
  if (!loss.empty()) throw Error(ErrorCode::kPeerLost, loss, kRestartJob);
}

// Throws when the view that this process joins, or is in, is not to be. Once it has joined, the scheduler speaks to it
// and no more to what it was before.
void Process::check_view(const Process* before) const {
  const bool has_joined = van_ && van_->joined();
  if (before != nullptr && !has_joined) before->van_->end().require_next_view();
  if (has_joined && van_->end().view_ended()) throw van::view_ended_error(van_->end().why());
}

Process::Process(const Settings& settings, const Startup& startup)
    : options_(settings, startup), secret_(job_secret(options_.settings.job, startup)), lineage_(new_lineage()) {}

Process::Process(Process& ended)
    : options_(ended.options_.settings, startup_after(ended.options_.startup, ended.van_->self())),
      secret_(ended.secret_),
      lineage_{.identity = ended.lineage_.identity,
               .renews = ended.van_->self().id,
               .is_late = ended.van_->is_late(),
               .resume_patience_s = ended.van_->end().resume_patience_ms() / 1e3},
      scheduler_(std::move(ended.scheduler_)) {}

Process::~Process() {
  take_down();
}

void Process::bring_up(const Process* before) {
  const Settings& settings = options_.settings;
  set_log(settings.log_level, "pid " + std::to_string(::getpid()));
  if (settings.job.local_rank.value_or(0) == 0) {
    log_unknown_settings();
    if (!secret_.warning.empty()) log_warning(secret_.warning);
  }
  if (const int error = transport::shm::SharedMemory::why_unavailable(); error != 0) {
    log_warning(std::string("no process of this host shares memory with this one (memfd_create: ") +
                std::strerror(error) + "): TCP is used in its place");
  }
  if (options_.startup.hosts_scheduler && !scheduler_) scheduler_ = host_scheduler(options_, secret_);
  van::VanEvents events = current_.events();
  events.on_question = [this](const van::Question& question) {
    const std::lock_guard lock(inspection_mutex_);
    if (inspection_) inspection_->ask(question);
  };
  van_ = std::make_unique<van::Van>(van_options(options_, secret_, lineage_, scheduler_ ? scheduler_->port() : 0),
                                    secret_.credentials, std::move(events));
  current_.set_van(van_.get());
  trace_ = make_trace(settings.trace);
  make_view();
  inspect();
  van::Node self = describe_self(options_, lineage_);
  current_.get()->describe(self);
  van_->join(self, options_.startup.workers, options_.startup.servers);
  if (before != nullptr) before->van_->retire();
  set_log(settings.log_level, van_->self().describe());
  current_.get()->start(*van_);
  metrics_server_ = serve(settings.metrics, options_.startup.is_worker() ? settings.job.local_rank.value_or(0) : 0,
                          [this] { return report().metric_families(); });
  if (trace_) trace_->start(traced_process(settings, van_->self(), van_->membership()));
}

void Process::make_view() {
  current_.begin(std::make_unique<View>(
      options_, tcp_rails(options_, secret_), trace_.get(),
      View::Events{.suspect = [this](std::uint32_t node, const std::string& why) { van_->suspect(node, why); },
                   .inquire = [this](std::uint32_t node) { van_->inquire(node); },
                   .on_failure = [this](Failure failure) { note_failure(failure); }}));
}

// Begins before the process joins: whom a start waits for is worth knowing, too.
void Process::inspect() {
  auto inspection = std::make_unique<Inspection>(
      Inspection::Source{.report = [this](bool with_stacks) { return report().dump(with_stacks); },
                         .job = [this](bool with_stacks) { return report().dump_job(with_stacks); },
                         .reply = [this](const van::Reply& reply) { van_->tell(reply); },
                         .dump_dir = options_.settings.dump_dir});
  const std::lock_guard lock(inspection_mutex_);
  inspection_ = std::move(inspection);
}

// Any thread calls this, perhaps with the lock of the view held: one that tells the worker of a loss.
void Process::note_failure(Failure failure) {
  const std::lock_guard lock(inspection_mutex_);
  if (inspection_) inspection_->note_failure(failure);
}

std::string Process::address() const {
  return current_.get()->loops().tcp_rails().front().address;
}

Report Process::report() const {
  return {options_, secret_.credentials, *van_, *current_.get(), scheduler_.get(), current_.incarnation()};
}

worker::Worker& Process::worker() {
  worker::Worker* const worker = current_.worker();
  if (worker == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "this process is a server, not a worker", "call this on workers only");
  }
  return *worker;
}

}  // namespace bps::node
