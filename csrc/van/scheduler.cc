// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps::van {
namespace {

// Members go on without a silent scheduler after this part of the time-out. The rest is for messages on their way.
constexpr double kMostSilence = 0.9;
// Members notice within the time-out that a scheduler is lost, and then look for the next one several times a second.
constexpr double kReunionGraceSeconds = 2;
constexpr int kNewsPerSecond = 100'000;  // how many messages tell members who is gone
constexpr auto kDumpPatience = std::chrono::milliseconds(500);

Fd listen_on_first_free(const SchedulerOptions& options) {
  for (std::size_t i = 0; i < options.ports.size(); ++i) {
    try {
      return transport::Listener::listen_tcp(options.address, options.ports[i]);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kPortTaken || i + 1 == options.ports.size()) throw;
    }
  }
  throw Error(ErrorCode::kInvalidArgument, "the scheduler has no port to listen on", "give at least one port");
}

// Each scheduler begins a new incarnation of its job.
transport::Credentials with_view(transport::Credentials credentials) {
  while (credentials.view.incarnation == 0) {
    random_bytes(std::as_writable_bytes(std::span(&credentials.view.incarnation, 1)));
  }
  return credentials;
}

std::chrono::milliseconds to_ms(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(seconds));
}

Job::Options job_options(const SchedulerOptions& options) {
  if (options.workers == 0)
    throw Error(ErrorCode::kInvalidArgument, "a job needs at least one worker", "set BPS_NUM_WORKERS");
  Job::Options job;
  job.registry.workers = options.workers;
  job.registry.servers = options.servers;
  job.registry.cut = options.cut;
  job.terms = options.terms;
  job.run = options.run;
  job.ends_alone = options.ends_alone;
  job.origin = options.origin;
  job.reunion_patience = to_ms(options.heartbeat_timeout_s + kReunionGraceSeconds);
  job.resume_timeout = to_ms(options.resume_timeout_s);
  job.silence_ms = static_cast<std::uint32_t>(std::clamp(options.heartbeat_timeout_s * 1e3, 1.0, 1e9));
  job.join_timeout = to_ms(options.join_timeout_s);
  return job;
}

SchedulerOptions with_run(SchedulerOptions options) {
  while (options.run == 0) random_bytes(std::as_writable_bytes(std::span(&options.run, 1)));
  return options;
}

}  // namespace

Scheduler::Scheduler(SchedulerOptions options, const transport::Credentials& credentials)
    : options_(with_run(std::move(options))),
      credentials_(with_view(credentials)),
      peers_(loop_, options_.heartbeat_timeout_s,
             {.on_message = [this](Peer peer, Message&& message) { receive(peer, std::move(message)); },
              .on_closed = [this](Peer peer, const std::string& why) { cut_off(peer, why); }}),
      job_(job_options(options_), {.send = [this](Peer peer, const Message& message) { send(peer, message); },
                                   .tell =
                                       [this](std::span<const Peer> peers, const Message& message) {
                                         publish();
                                         peers_.send(peers, message);
                                       },
                                   .on_lost = options_.on_lost,
                                   .on_suspended = options_.on_suspended,
                                   // Members that learn of the end may start the next job on this port at once.
                                   .on_over = [this] { close_listener(); },
                                   .close = [this](Peer peer) { peers_.close(peer); },
                                   .on_epoch = [this](std::uint32_t epoch) { begin(epoch); },
                                   .silence_ms = [this](Peer peer) { return peers_.silence_ms(peer); }}),
      ended_well_(end_.get_future()) {
  Fd listener = listen_on_first_free(options_);
  port_ = transport::Listener::port_of(listener.get());
  listener_loop_.call([&] {
    listener_ = std::make_unique<transport::Listener>(
        listener_loop_.loop(), std::move(listener), credentials_,
        [this](transport::AuthenticatedSocket&& socket) { post_entry(std::move(socket)); });
  });
  thread_ = start_thread([this] { run(); });
}

Scheduler::~Scheduler() {
  stop();
  thread_.join();
  listener_loop_.call([this] { listener_.reset(); });
}

// ---- From any thread

void Scheduler::stop() {
  Life running = Life::kRunning;
  (void)life_.compare_exchange_strong(running, Life::kStopped);
  loop_.wake();
}

// The posted function may run when nobody waits any more.
std::string Scheduler::dump() {
  const auto told = std::make_shared<std::promise<std::string>>();
  std::future<std::string> reply = told->get_future();
  loop_.post([this, told] { told->set_value(job_.dump()); });
  if (reply.wait_for(kDumpPatience) == std::future_status::ready) return reply.get();
  return JsonObject().add("role", std::string("scheduler")).add("error", std::string("its thread hangs")).end();
}

void Scheduler::shift(std::vector<std::uint64_t> links) {
  loop_.post([this, links = std::move(links)] {
    if (job_.links() != nullptr) job_.links()->shift(links, Clock::now());
  });
}

Scheduler::Counters Scheduler::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.refused += listener_->refused();
  return counters;
}

// ---- The scheduler's thread

void Scheduler::run() {
  name_thread("bps-scheduler");
  const Timer beats = loop_.every(peers_.beat_s(), [this] { beat(); });
  const Timer looks = loop_.every(peers_.look_s(), [this] { cut_off_silent(); });
  try {
    while (life_ == Life::kRunning && !(job_.phase() == Job::Phase::kOver && peers_.size() == 0)) {
      loop_.turn(std::min(time_to_join_deadline(), time_to_news()));
      if (job_.has_departed() && (life_ != Life::kRunning || time_to_news() == Duration::zero())) tell_departed();
      if (job_.join_deadline().value_or(Clock::time_point::max()) <= Clock::now() && !step_down()) job_.give_up();
      publish();
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, std::string("the scheduler failed: ") + error.what());
  }
  peers_.close_all();
  close_listener();
  end_.set_value(job_.ended_well());
}

Duration Scheduler::time_to_join_deadline() const {
  const auto deadline = job_.join_deadline();
  if (!deadline) return std::chrono::hours(1);
  return std::max(Duration::zero(), Duration(*deadline - Clock::now()));
}

// Returns when to tell who is gone. When thousands leave at one time, each hears of the others in a few messages.
Duration Scheduler::time_to_news() const {
  if (!job_.has_departed()) return std::chrono::hours(1);
  const Duration spread = std::chrono::seconds(peers_.size()) / kNewsPerSecond;
  return std::max(Duration::zero(), Duration(last_news_ + spread - Clock::now()));
}

// Tells nothing after a silence: see step_down(). Where this scheduler is ended, those that leave have their replies.
void Scheduler::tell_departed() {
  if (step_down() && stepped_down()) return;
  job_.tell_departed();
  last_news_ = Clock::now();
}

// Sets the view of which a process hears that connects from now on.
void Scheduler::begin(std::uint32_t epoch) {
  listener_loop_.call([&] { credentials_.view.epoch = epoch; });
}

void Scheduler::close_listener() {
  listener_loop_.call([this] { listener_->close(); });
}

// Runs on the listener's thread: unauthenticated peers never reach the loop that sends heartbeats.
void Scheduler::post_entry(transport::AuthenticatedSocket&& socket) {
  if (socket.hello.plane != transport::Plane::kVan) return;
  const auto shared = std::make_shared<transport::AuthenticatedSocket>(std::move(socket));  // must be copyable
  loop_.post([this, shared] { peers_.add(std::move(shared->socket), shared->key); });
}

void Scheduler::receive(Peer peer, Message&& message) {
  if (step_down()) return;
  {
    const std::lock_guard lock(mutex_);
    ++counters_.messages;
  }
  if (!job_.receive(peer, std::move(message))) cut_off(peer, "it sent an unexpected message");
}

void Scheduler::send(Peer peer, const Message& message) {
  publish();  // comes first: a process that sees the consequence of an event also sees it counted
  peers_.send(peer, message);
}

// Members that have gone on without this scheduler are not lost, and those that have not must hear nothing of the kind.
// So once it has been silent for so long that some may have gone on, it decides nothing any more. This is checked
// before each decision, because connections that were closed meanwhile may be seen before the next heartbeat.
bool Scheduler::step_down() {
  const bool gathers = job_.phase() == Job::Phase::kGathering || job_.phase() == Job::Phase::kSuspended;
  if (!options_.is_outlived || life_ != Life::kRunning || gathers) return life_ != Life::kRunning;
  const std::chrono::duration<double> silence = Clock::now() - peers_.last_beat();
  if (silence.count() < kMostSilence * options_.heartbeat_timeout_s) return false;
  log_warning("this scheduler was stopped for " + std::to_string(silence.count()).substr(0, 4) +
              " s: members may have gone on without it, and it ends");
  life_ = Life::kSteppedDown;
  return true;
}

void Scheduler::cut_off(Peer peer, const std::string& why) {
  if (step_down()) return;
  peers_.close(peer);
  job_.closed(peer, why);
}

void Scheduler::beat() {
  if (step_down()) return;
  peers_.beat(job_);
  if (job_.links() != nullptr) job_.links()->look(peers_.last_beat());
}

// Cuts off silent processes. One that has not joined yet, or again, was perhaps stopped before: it tries once more.
void Scheduler::cut_off_silent() {
  if (step_down()) return;
  for (const auto& [peer, why] : peers_.find_silent(job_)) {
    if (job_.knows(peer)) {
      send(peer, Refused{ErrorCode::kPeerLost, "this process was " + why + "; the job goes on without it",
                         "raise BPS_HEARTBEAT_TIMEOUT if processes may be stopped for so long"});
    }
    cut_off(peer, why);
  }
}

void Scheduler::publish() {
  const Job::Counts counts = job_.counts();
  const std::lock_guard lock(mutex_);
  counters_ = {.messages = counters_.messages,
               .declared = counts.declared,
               .barriers = counts.barriers,
               .lost = counts.lost,
               .refused = counts.refused,
               .members = peers_.members(),
               .epoch = job_.epoch(),
               .silence_ms = peers_.longest_silence_ms()};
}

}  // namespace bps::van
