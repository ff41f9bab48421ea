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

constexpr double kVerdict_s = 1;  // the scheduler's verdict may come so long after the heartbeat's time-out
constexpr double kLook_s = 0.02;

Startup startup_after(const Startup& before, const van::Node& self) {
  Startup startup = before;
  startup.worker_rank = self.worker_rank;
  if (startup.is_server()) startup.server_rank = self.server_rank;  // this leaves alone a worker which may serve
  return startup;
}

// Throws when the view that a process joins, or is in, is not to be. Once it has joined, the scheduler speaks to its
// van and no more to that of the view before. Both may be null.
void check_view(const van::Van* van, const van::Van* before) {
  const bool has_joined = van != nullptr && van->joined();
  if (before != nullptr && !has_joined) before->end().require_next_view();
  if (has_joined && van->end().view_ended()) throw van::view_ended_error(van->end().why());
}

// Waits for the scheduler's word, as a peer that could not be reached may be a member whose loss it has not told yet.
bool awaits_next_view(const van::Van* van, const Settings& settings) {
  if (van == nullptr || !van->joined()) return false;
  if (van->end().view_ended()) return true;
  if (settings.job.min_workers == 0) return false;
  const Deadline verdict = Deadline::after(settings.deadlines.heartbeat + kVerdict_s);
  while (!van->end().view_ended() && (!verdict.passed() || van->awaits_scheduler()))
    sleep_until(Deadline::after(kLook_s));
  return van->end().view_ended();
}

// Throws the loss of a member instead, as it says more than what followed from it here.
void require_no_loss_before(ErrorCode code, const van::Van* van) {
  if (code != ErrorCode::kUnreachable && code != ErrorCode::kTransport && code != ErrorCode::kTimeout) return;
  const std::string loss = van != nullptr ? van->end().first_loss().why : "";
  if (!loss.empty()) throw Error(ErrorCode::kPeerLost, loss, kRestartJob);
}

}  // namespace

std::unique_ptr<Process> Process::start(const Settings& settings, const Startup& startup) {
  return bring_up(std::unique_ptr<Process>(new Process(settings, startup)), nullptr);
}

std::unique_ptr<Process> Process::renew(Process& ended) {
  ended.retire();
  auto next = bring_up(std::unique_ptr<Process>(new Process(ended)), &ended);
  next->ended_trace_ = std::move(ended.ended_trace_);  // a long trace takes seconds, for which no view waits
  ended.take_down();                                   // until now it has shown the scheduler that this process lives
  return next;
}

// Begins again with the next view if this one ends first: a member may be lost meanwhile.
std::unique_ptr<Process> Process::bring_up(std::unique_ptr<Process> process, const Process* before) {
  std::unique_ptr<Process> ended;
  for (;;) {
    try {
      const van::Van* const van_before = before != nullptr ? before->van_.get() : nullptr;
      const InterruptScope scope([&] { check_view(process->van_.get(), van_before); });
      process->bring_up(before);
      return process;
    } catch (const Error& error) {
      if (!awaits_next_view(process->van_.get(), process->options_.settings)) {
        require_no_loss_before(error.code(), process->van_.get());
        throw;
      }
    }
    process->retire();
    std::unique_ptr<Process> next(new Process(*process));
    ended = std::exchange(process, std::move(next));
    before = ended.get();
  }
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
  if (before == nullptr && settings.worker.gpudirect && options_.startup.is_worker() && options_.survives_servers()) {
    log_warning(
        "BPS_GPUDIRECT=1 has no effect on operations that survive the loss of a server: arrays of GPUs go through "
        "staging buffers, unless BPS_SERVER_FAILOVER=0");
  }
  if (options_.startup.hosts_scheduler && !scheduler_) scheduler_ = host_scheduler(options_, secret_);
  van::VanEvents events = current_.events();
  events.on_question = [this](const van::Question& question) { inspection_.ask(question); };
  van_ = std::make_unique<van::Van>(van_options(options_, secret_, lineage_, scheduler_ ? scheduler_->port() : 0),
                                    secret_.credentials, std::move(events));
  current_.set_van(van_.get());
  trace_ = make_trace(settings.trace);
  make_view();
  // The inspection begins before the process joins: whom a start waits for is worth knowing, too.
  inspection_.begin({.report = [this](bool with_stacks) { return report().dump(with_stacks); },
                     .job = [this](bool with_stacks) { return report().dump_job(with_stacks); },
                     .reply = [this](const van::Reply& reply) { van_->tell(reply); },
                     .dump_dir = settings.dump_dir});
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
                   // A thread that tells the worker of a loss calls this with the lock of the view held.
                   .on_failure = [this](Failure failure) { inspection_.note_failure(failure); }}));
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
