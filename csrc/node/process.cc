// SPDX-License-Identifier: Apache-2.0
#include "node/process.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "compress/codec_call.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "core/unknown_settings.h"
#include "node/hosted_scheduler.h"
#include "node/local_address.h"
#include "node/tcp_rails.h"
#include "node/trace.h"
#include "node/view.h"
#include "transport/shm/shared_memory.h"
#include "van/scheduler.h"
#include "van/select.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

constexpr double kVerdict_s = 1;  // of the scheduler, after the heartbeat's time-out
// After this part of the heartbeat's time-out what a codec may wait for is refused: the loop that runs it can then go
// on before this process counts as lost.
constexpr double kRefusesCalls = 0.75;
constexpr double kLook_s = 0.02;

Startup startup_after(const Startup& before, const van::Node& self) {
  Startup startup = before;
  startup.worker_rank = self.worker_rank;
  if (startup.is_server()) startup.server_rank = self.server_rank;  // not that of a worker which may serve
  return startup;
}

// The scheduler of a large job is told less often: of so many connections with each heartbeat, by all members.
constexpr std::size_t kMostTold = 50'000;
std::size_t beats_per_link_use(const van::Membership& members) {
  return members.nodes.size() * members.servers / kMostTold + 1;
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
  if (van_->end().view_ended()) return true;
  if (options_.settings.job.min_workers == 0) return false;
  const Deadline verdict = Deadline::after(options_.settings.deadlines.heartbeat + kVerdict_s);
  while (!van_->end().view_ended() && (!verdict.passed() || van_->awaits_scheduler())) sleep_until(Deadline::after(kLook_s));
  return van_->end().view_ended();
}

// Throws when the view that this process joins, or is in, is not to be. Once it has joined, the scheduler speaks to it
// and no more to what it was before.
void Process::check_view(const Process* before) const {
  const bool has_joined = van_ && van_->joined();
  if (before != nullptr && !has_joined) before->van_->end().require_next_view();
  if (has_joined && van_->end().view_ended()) throw van::view_ended_error();
}

Process::Process(const Settings& settings, const Startup& startup)
    : options_(settings, startup), secret_(job_secret(options_.settings.job, startup)), identity_(new_identity()) {}

Process::Process(Process& ended)
    : options_(ended.options_.settings, startup_after(ended.options_.startup, ended.van_->self())),
      secret_(ended.secret_),
      renews_(ended.van_->self().id),
      resume_patience_s_(ended.van_->end().resume_patience_ms() / 1e3),
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
  if (options_.startup.hosts_scheduler && !scheduler_) scheduler_ = host_scheduler(options_, secret_);
  make_van();
  trace_ = make_trace(options_.settings.trace);
  make_view();
  inspect();
  van_->join(describe_self(), options_.startup.workers, options_.startup.servers);
  if (before != nullptr) before->van_->retire();
  set_log(options_.settings.log_level, van_->self().describe());
  view_->start(*van_);
  metrics_server_ = serve(options_.settings.metrics,
                          options_.startup.is_worker() ? options_.settings.job.local_rank.value_or(0) : 0,
                          [this] { return report().metric_families(); });
  if (trace_) start_trace();
}

void Process::make_view() {
  auto view = std::make_unique<View>(
      options_, tcp_rails(), trace_.get(),
      View::Events{.suspect = [this](std::uint32_t node, const std::string& why) { van_->suspect(node, why); },
                   .inquire = [this](std::uint32_t node) { van_->inquire(node); },
                   .on_failure = [this](Failure failure) { note_failure(failure); }});
  const std::lock_guard lock(mutex_);
  view_ = std::move(view);
}

// Begins before the process joins: whom a start waits for is worth knowing, too.
void Process::inspect() {
  auto inspection =
      std::make_unique<Inspection>(Inspection::Source{.report = [this](bool with_stacks) { return report().dump(with_stacks); },
                                                      .job = [this](bool with_stacks) { return report().dump_job(with_stacks); },
                                                      .reply = [this](const van::Reply& reply) { van_->tell(reply); },
                                                      .dump_dir = options_.settings.dump_dir});
  const std::lock_guard lock(inspection_mutex_);
  inspection_ = std::move(inspection);
}

void Process::make_van() {
  van::VanOptions options;
  options.scheduler_host = options_.startup.scheduler_host;
  // Without the network, whichever of this host's names its ranks were told.
  if (options_.is_hosted_by_rank_0() && (secret_.one_host || is_of_this_host(options.scheduler_host))) {
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
  options.outlives_scheduler = options_.settings.job.min_workers > 0 && !options_.is_hosted_by_rank_0();
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
  self.may_serve = options_.may_serve;
  self.terms = options_.terms();
  self.has_state = options_.startup.is_worker() && (renews_ != 0 || options_.startup.resumes);
  view_->describe(self);
  return self;
}

van::VanEvents Process::events() {
  return {
      .on_view = [this](const transport::ViewId& view) { use(view); },
      .on_lost = [this](std::uint32_t node, const std::string& why) { in_view(&View::lose_node, node, why); },
      .on_left = [this](std::uint32_t node, const std::string& why) { in_view(&View::leave_node, node, why); },
      .on_reachable =
          [this](std::uint32_t node) {
            const std::lock_guard lock(mutex_);
            if (view_ && view_->worker()) view_->worker()->on_reachable(node);
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
            if (view_) view_->loops().add_group(group, std::move(known));
          },
      .on_tensor_failed =
          [this](std::uint32_t tensor, const std::string& why) {
            const std::lock_guard lock(mutex_);
            if (!view_) return;
            view_->loops().fail_tensor(tensor, why);
            if (view_->worker()) view_->worker()->fail_tensor(tensor, why);
          },
      .on_beat =
          [this, beat = std::size_t{0}]() mutable {
            const std::lock_guard lock(mutex_);
            if (!view_) return;  // the van may be on its way out as well
            const van::Membership& members = van_->membership();
            if (beat++ % beats_per_link_use(members) != 0 || !van::can_shift(members)) return;
            view_->loops().ask_link_use([this](const van::LinkUse& use) { van_->tell(use); });
          },
      .on_shift_begun =
          [this](const van::BeginShift& shift) {
            const std::lock_guard lock(mutex_);
            if (!view_ || !view_->worker()) return;  // without a reply the scheduler calls it off
            van_->tell(van::Rounds{shift.number, view_->worker()->begin_shift()});
          },
      .on_shift_ended =
          [this](const van::EndShift& shift) {
            const std::lock_guard lock(mutex_);
            if (view_ && view_->worker()) view_->worker()->end_shift(shift);
          },
      .find_stuck = [this](Duration silence) -> std::string {
        const std::lock_guard lock(mutex_);
        const std::string stuck = view_ ? view_->loops().find_stuck() : "";
        if (stuck.empty()) return stuck;
        if (silence >= to_duration(kRefusesCalls * options_.settings.deadlines.heartbeat)) {
          compress::CodecCall::refuse_behind(silence / 2);
        }
        return stuck + compress::CodecCall::describe_longest();
      },
      .is_in_use =
          [this] {
            const std::lock_guard lock(mutex_);
            return view_ && view_->loops().serves();
          },
  };
}

void Process::in_view(void (View::*tell)(std::uint32_t, const std::string&), std::uint32_t node,
                      const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (view_) ((*view_).*tell)(node, why);
}

// On the van's thread.
void Process::use(const transport::ViewId& view) {
  const std::lock_guard lock(mutex_);
  incarnation_ = view.incarnation;
  if (view_) view_->use(secret_.credentials.of(view));
}

void Process::end_view(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (view_) view_->end_view(van::view_ended_error(why));
}

worker::Worker& Process::worker() {
  worker::Worker* const worker = view_ ? view_->worker() : nullptr;
  if (worker == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "this process is a server, not a worker", "call this on workers only");
  }
  return *worker;
}

bool Process::view_ended() {
  const std::lock_guard lock(mutex_);
  const worker::Worker* const worker = view_ ? view_->worker() : nullptr;
  return van_->end().view_ended() || (worker != nullptr && worker->view_ended());
}

Report Process::report() const {
  return {options_, secret_.credentials, *van_, *view_, scheduler_.get(), incarnation_};
}

// Any thread calls this, perhaps with mutex_ held: one that tells the worker of a loss.
void Process::note_failure(Failure failure) {
  const std::lock_guard lock(inspection_mutex_);
  if (inspection_) inspection_->note_failure(failure);
}

}  // namespace bps::node
