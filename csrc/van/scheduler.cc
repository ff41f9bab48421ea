// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/threads.h"
#include "transport/listener.h"
#include "van/connection.h"
#include "van/job.h"

namespace bps::van {

namespace {

// How long a connection stays open that has not asked to join or was refused: the reason must have time to arrive.
constexpr auto kLinger = std::chrono::seconds(2);
// The part of the time-out after which members go on without a silent scheduler: the rest is for messages on their way.
constexpr double kMostSilence = 0.9;
constexpr double kBeatSeconds = 0.5;  // as members send theirs, or more often where the time-out is short
constexpr double kBeatsPerTimeout = 12;
// Members notice within the time-out that a scheduler is lost, and then look for the next one several times a second.
constexpr double kReunionGraceSeconds = 2;
constexpr int kNewsPerSecond = 100'000;  // messages that tell members who is gone
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
  job.reunion_patience = std::chrono::duration_cast<std::chrono::milliseconds>(
      to_duration(options.heartbeat_timeout_s + kReunionGraceSeconds));
  job.resume_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(options.resume_timeout_s));
  job.silence_ms = static_cast<std::uint32_t>(std::clamp(options.heartbeat_timeout_s * 1e3, 1.0, 1e9));
  job.join_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(to_duration(options.join_timeout_s));
  return job;
}

SchedulerOptions with_run(SchedulerOptions options) {
  while (options.run == 0) random_bytes(std::as_writable_bytes(std::span(&options.run, 1)));
  return options;
}

}  // namespace

class Scheduler::Impl {
 public:
  Impl(SchedulerOptions options, const transport::Credentials& credentials)
      : options_(with_run(std::move(options))),
        credentials_(with_view(credentials)),
        job_(job_options(options_),
             {.send = [this](Peer peer, const Message& message) { send(peer, message); },
              .tell = [this](std::span<const Peer> peers, const Message& message) { tell(peers, message); },
              .on_lost = options_.on_lost,
              .on_suspended = options_.on_suspended,
              // Members that learn of the end may start the next job on this port at once.
              .on_over = [this] { close_listener(); },
              .close = [this](Peer peer) { connections_.erase(peer); },
              .on_epoch = [this](std::uint32_t epoch) { begin(epoch); },
              .silence_ms = [this](Peer peer) { return silence_ms(peer); }}) {
    Fd listener = listen_on_first_free(options_);
    port_ = transport::Listener::port_of(listener.get());
    listener_loop_.call([&] {
      listener_ = std::make_unique<transport::Listener>(
          listener_loop_.loop(), std::move(listener), credentials_,
          [this](transport::AuthenticatedSocket&& socket) { post_entry(std::move(socket)); });
    });
    beat_ = loop_.every(std::min(kBeatSeconds, options_.heartbeat_timeout_s / kBeatsPerTimeout), [this] { beat(); });
    sweep_ = loop_.every(period_s(), [this] { sweep(); });
    thread_ = start_thread([this] { run(); });
  }

  ~Impl() {
    stop();
    thread_.join();
    listener_loop_.call([this] { listener_.reset(); });
  }

  std::uint16_t port() const { return port_; }

  bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return ended_well_;
  }

  bool stepped_down() const { return stepped_down_; }

  void stop() {
    stopping_ = true;
    loop_.wake();
  }

  // The closure may run when nobody waits any more.
  std::string dump() {
    const auto told = std::make_shared<std::promise<std::string>>();
    std::future<std::string> reply = told->get_future();
    loop_.post([this, told] { told->set_value(job_.dump()); });
    if (reply.wait_for(kDumpPatience) == std::future_status::ready) return reply.get();
    return JsonObject().add("role", std::string("scheduler")).add("error", std::string("its thread hangs")).end();
  }

  void shift(std::vector<std::uint64_t> links) {
    loop_.post([this, links = std::move(links)] {
      if (job_.links() != nullptr) job_.links()->shift(links, Clock::now());
    });
  }

  Counters counters() const {
    return {messages_, declared_, barriers_, lost_, refused_ + listener_->refused(), members_, epoch_, silence_ms_};
  }

 private:
  double period_s() const { return options_.heartbeat_timeout_s / 4; }

  void run() {
    name_thread("bps-scheduler");
    try {
      while (!stopping_ && !(job_.phase() == Job::Phase::kOver && connections_.empty())) {
        loop_.turn(std::min(time_to_join_deadline(), time_to_news()));
        if (job_.has_departed() && (stopping_ || time_to_news() == Duration::zero())) tell_departed();
        if (job_.join_deadline().value_or(Clock::time_point::max()) <= Clock::now() && !step_down()) job_.give_up();
        publish();
      }
    } catch (const std::exception& error) {
      log_line(LogLevel::kError, std::string("the scheduler failed: ") + error.what());
    }
    connections_.clear();
    close_listener();
    const std::lock_guard lock(mutex_);
    done_ = true;
    ended_well_ = job_.phase() == Job::Phase::kOver && job_.ended_well();
    changed_.notify_all();
  }

  Duration time_to_join_deadline() const {
    const auto deadline = job_.join_deadline();
    if (!deadline) return std::chrono::hours(1);
    return std::max(Duration::zero(), Duration(*deadline - Clock::now()));
  }

  // When thousands leave at the same time, each hears of the others in a few messages.
  Duration time_to_news() const {
    if (!job_.has_departed()) return std::chrono::hours(1);
    const Duration spread = std::chrono::seconds(connections_.size()) / kNewsPerSecond;
    return std::max(Duration::zero(), Duration(last_news_ + spread - Clock::now()));
  }

  // Not after a silence: see step_down(). Where this scheduler is ended, those that leave have their replies.
  void tell_departed() {
    if (step_down() && stepped_down_) return;
    job_.tell_departed();
    last_news_ = Clock::now();
  }

  // A process that connects from here on is told of this view.
  void begin(std::uint32_t epoch) {
    listener_loop_.call([&] { credentials_.view.epoch = epoch; });
  }

  void close_listener() {
    listener_loop_.call([this] { listener_->close(); });
  }

  std::int64_t silence_ms(Peer peer) const {
    const auto found = connections_.find(peer);
    if (found == connections_.end()) return 0;
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - found->second->heard()).count();
  }

  // On the listener's thread: unauthenticated peers never reach the loop that sends heartbeats.
  void post_entry(transport::AuthenticatedSocket&& socket) {
    if (socket.hello.plane != transport::Plane::kVan) return;
    const auto shared = std::make_shared<transport::AuthenticatedSocket>(std::move(socket));  // must be copyable
    loop_.post([this, shared] { enter(std::move(shared->socket), shared->key); });
  }

  void enter(Fd socket, const Digest& key) {
    const Peer peer = ++last_peer_;
    connections_[peer] = std::make_unique<Connection>(
        loop_, std::move(socket), transport::MessageKeys::of_server(key),
        [this, peer](Message&& message) { receive(peer, std::move(message)); },
        [this, peer](const std::string& why) { cut_off(peer, why); });
  }

  void receive(Peer peer, Message&& message) {
    if (step_down()) return;
    ++messages_;
    if (!job_.receive(peer, std::move(message))) cut_off(peer, "it sent an unexpected message");
  }

  // Members that have gone on without this scheduler are not lost, and those that have not must hear nothing of the
  // kind: once it has been silent for so long that some may have, it decides nothing any more. Checked before anything
  // is decided, because connections that were closed meanwhile may be seen before the next heartbeat.
  bool step_down() {
    const bool gathers = job_.phase() == Job::Phase::kGathering || job_.phase() == Job::Phase::kSuspended;
    if (!options_.is_outlived || stopping_ || gathers) return stopping_;
    const std::chrono::duration<double> silence = Clock::now() - last_beat_;
    if (silence.count() < kMostSilence * options_.heartbeat_timeout_s) return false;
    log_warning("this scheduler was stopped for " + std::to_string(silence.count()).substr(0, 4) +
                " s: members may have gone on without it, and it ends");
    stepped_down_ = stopping_ = true;
    return true;
  }

  void cut_off(Peer peer, const std::string& why) {
    if (step_down()) return;
    connections_.erase(peer);
    job_.closed(peer, why);
  }

  void send(Peer peer, const Message& message) {
    publish();  // first, so that a process that sees the consequence of an event also sees it counted
    if (const auto found = connections_.find(peer); found != connections_.end()) found->second->send(message);
  }

  void tell(std::span<const Peer> peers, const Message& message) {
    publish();
    if (peers.empty()) return;
    const auto shared = std::make_shared<const transport::SharedMessage>(encode(message));
    for (const Peer peer : peers) {
      if (const auto found = connections_.find(peer); found != connections_.end()) found->second->send_shared(shared);
    }
  }

  // Far more often than a sweep: members count the time since the last one, and not since this process was stopped.
  void beat() {
    if (step_down()) return;
    last_beat_ = Clock::now();
    if (job_.links() != nullptr) job_.links()->look(last_beat_);
    const std::chrono::milliseconds spread{connections_.size() * 1000 / Job::kBeatsPerSecond};
    if (last_beat_ - last_told_ < std::min(spread, std::chrono::milliseconds(job_.beat_ms()))) return;
    last_told_ = last_beat_;
    const auto heartbeat = std::make_shared<const transport::SharedMessage>(encode(Heartbeat{}));
    for (const auto& [peer, connection] : connections_) {
      if (!job_.knows(peer)) continue;
      // Members need not send heartbeats before all have joined, however long that takes.
      if (job_.waits(peer)) connection->forgive_silence();
      connection->send_shared(heartbeat);
    }
  }

  // Closes the connections of members that are silent.
  void sweep() {
    if (step_down()) return;
    const auto now = Clock::now();
    const auto since_last = now - std::exchange(last_sweep_, now);
    const auto timeout = std::chrono::duration<double>(options_.heartbeat_timeout_s);
    // A process that was stopped itself (by a debugger, by a closed lid) cannot tell who was silent meanwhile.
    const bool was_stopped = since_last > timeout / 2;
    const bool was_late = since_last > 1.5 * std::chrono::duration<double>(period_s());
    std::vector<std::pair<Peer, double>> silent;
    std::size_t members = 0;
    double longest_s = 0;
    std::size_t heard = 0;  // members that have sent a heartbeat when it was due
    for (const auto& [peer, connection] : connections_) {
      const bool is_known = job_.knows(peer);
      if (is_known ? was_stopped || job_.waits(peer) : was_late) connection->forgive_silence();
      const std::chrono::duration<double> silence = now - connection->heard();
      if (is_known) {
        ++members;
        longest_s = std::max(longest_s, silence.count());
        if (silence < timeout / 2) ++heard;
        if (silence > timeout) silent.emplace_back(peer, silence.count());
      } else if (silence > kLinger) {
        silent.emplace_back(peer, silence.count());
      }
    }
    members_ = members;
    silence_ms_ = static_cast<std::uint64_t>(longest_s * 1e3);
    // A network that is cut in one direction: the others are in good health, and hear what is said here of them.
    const bool hears_nobody = members > 1 && heard == 0;
    for (const auto& [peer, seconds] : silent) {
      std::string why = "silent for " + std::to_string(seconds).substr(0, 4) + " s";
      if (hears_nobody) why += ", and so are all others: the scheduler's own network may be cut";
      // A process that has not joined yet, or again, was stopped before it could, perhaps: it tries once more.
      if (job_.knows(peer)) {
        send(peer, Refused{ErrorCode::kPeerLost, "this process was " + why + "; the job goes on without it",
                           "raise BPS_HEARTBEAT_TIMEOUT if processes may be stopped for so long"});
      }
      cut_off(peer, why);
    }
  }

  void publish() {
    declared_ = job_.declared();
    barriers_ = job_.barriers();
    lost_ = job_.lost();
    refused_ = job_.refused();
    epoch_ = job_.epoch();
  }

  const SchedulerOptions options_;
  transport::Credentials credentials_;  // of the listener's thread, once that runs
  EventLoop loop_;
  transport::ListenerLoop listener_loop_;
  Job job_;
  std::unique_ptr<transport::Listener> listener_;
  std::unordered_map<Peer, std::unique_ptr<Connection>> connections_;
  Peer last_peer_ = 0;
  Timer beat_, sweep_;
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point last_told_{};  // to the members
  Clock::time_point last_news_{};  // of who is gone
  Clock::time_point last_sweep_ = Clock::now();
  std::uint16_t port_ = 0;

  std::atomic<std::uint64_t> messages_{0}, declared_{0}, barriers_{0}, lost_{0}, refused_{0};
  std::atomic<std::uint64_t> members_{0}, epoch_{1}, silence_ms_{0};
  std::atomic<bool> stopping_{false}, stepped_down_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;        // guarded by mutex_
  bool ended_well_ = false;  // guarded by mutex_
  std::thread thread_;
};

Scheduler::Scheduler(SchedulerOptions options, const transport::Credentials& credentials)
    : impl_(std::make_unique<Impl>(std::move(options), credentials)) {}
Scheduler::~Scheduler() = default;
std::uint16_t Scheduler::port() const {
  return impl_->port();
}
bool Scheduler::wait() {
  return impl_->wait();
}
bool Scheduler::stepped_down() const {
  return impl_->stepped_down();
}
void Scheduler::stop() {
  impl_->stop();
}
void Scheduler::shift(std::vector<std::uint64_t> links) {
  impl_->shift(std::move(links));
}
std::string Scheduler::dump() const {
  return impl_->dump();
}
Scheduler::Counters Scheduler::counters() const {
  return impl_->counters();
}

}  // namespace bps::van
