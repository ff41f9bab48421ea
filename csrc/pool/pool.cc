// SPDX-License-Identifier: Apache-2.0
#include "pool/pool.h"

#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/hmac.h"
#include "core/limits.h"
#include "core/log.h"
#include "pool/report.h"
#include "pool/sealed_secret.h"

namespace bps::pool {
namespace {

constexpr double kLook_s = 0.25;
constexpr double kPatience_s = 120;  // bounds how long a user may ask nothing
constexpr std::size_t kMostSessions = 256;
constexpr std::size_t kMostOfUser = 16;

std::vector<int> cpus_of_this_process() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) throw_errno("cannot ask which cores this process may use");
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

Limits limits_of(const PoolSettings& settings) {
  const auto cores = static_cast<std::uint32_t>(cpus_of_this_process().size());
  return Limits::from(settings, {.cores = cores, .memory = memory_limit()});
}

Fd open_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&set, number);
  Fd signals(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals) throw_errno("cannot wait for signals");
  return signals;
}

// Makes credentials that nobody has, as the key is made up.
transport::Credentials nobodys(const transport::JobId& job) {
  transport::Credentials credentials;
  credentials.job = job;
  random_bytes(credentials.key);
  return credentials;
}

}  // namespace

Pool::Session::Session(std::string name, transport::AuthenticatedSocket& socket)
    : user(std::move(name)),
      key(socket.key),
      stream(std::move(socket.socket), transport::MessageKeys::of_server(socket.key), kMostMessage) {}

Pool::Pool(const Settings& settings)
    : settings_(settings),
      port_(settings.pool.port),
      listening_(transport::Listener::listen_tcp(settings.pool.host, settings.pool.port)),
      jobs_(limits_of(settings.pool), cpus_of_this_process(), name_of_pool(settings.pool.host, port_),
            settings.metrics.port),
      signals_(open_signals()) {
  read_users();
  jobs_.find();
  watch_jobs();
  loop_.watch(signals_.get(), EPOLLIN, [this](std::uint32_t) { on_signal(); });
  strangers_.call([this] {
    listener_ = std::make_unique<transport::Listener>(
        strangers_.loop(), std::move(listening_),
        [this](const transport::JobId& job) { return credentials_of_job(job); },
        [this](transport::AuthenticatedSocket&& socket) { enter(std::move(socket)); });
  });
  metrics_ = node::serve(settings_.metrics, 0, [this] { return metrics(); });
}

Pool::~Pool() {
  metrics_.reset();
  strangers_.call([this] { listener_.reset(); });
}

int Pool::run() {
  while (ended_by_ == 0 || (ended_by_ == SIGINT && jobs_.are_running())) {
    try {
      loop_.turn(std::chrono::hours(1));
    } catch (const std::exception& error) {  // it is of one connection
      log_warning(std::string("a request to the pool failed: ") + error.what());
    }
  }
  return ended_by_;
}

void Pool::read_users() {
  std::map<transport::JobId, UserKey> users;
  for (UserKey& user : read_keys(settings_.pool.key_file)) users.emplace(credentials_of(user).job, std::move(user));
  strangers_.call([&] { users_.swap(users); });
}

// ---- On the listener's thread

transport::Credentials Pool::credentials_of_job(const transport::JobId& job) const {
  const auto found = users_.find(job);
  return found == users_.end() ? nobodys(job) : credentials_of(found->second);
}

void Pool::enter(transport::AuthenticatedSocket&& socket) {
  const auto user = users_.find(socket.job);
  if (user == users_.end()) return;  // the keys have been read again meanwhile
  auto kept = std::make_shared<transport::AuthenticatedSocket>(std::move(socket));
  loop_.post([this, kept, name = user->second.user] {
    const auto of_user = std::ranges::count(sessions_, name, &Session::user);
    if (sessions_.size() >= kMostSessions || static_cast<std::size_t>(of_user) >= kMostOfUser) return;
    const auto session = sessions_.emplace(sessions_.end(), name, *kept);
    session->expiry = loop_.after(kPatience_s, [this, session] { close(session); });
    session->stream.start(loop_, {.on_message = [this, session](auto message) { answer(session, message); },
                                  .on_closed = [this, session](const std::string&) { close(session); }});
  });
}

// ---- On the pool's thread

void Pool::answer(Sessions::iterator session, std::span<const std::byte> message) {
  const auto request = codec::decode<Request>(message);
  Reply reply;
  try {
    if (!request) throw Error(ErrorCode::kInvalidArgument, "the request cannot be read", "install the same version");
    const std::lock_guard lock(mutex_);
    reply = answer_to(*session, *request);
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    ++refused_requests_;
    reply = Refused{error.code(), error.what(), error.hint()};
    log_info("user " + session->user + " is refused: " + error.what());
  }
  session->expiry = loop_.after(kPatience_s, [this, session] { close(session); });
  (void)session->stream.send(codec::encode(reply));  // the loop notices when the stream is closed
  watch_jobs();
}

Reply Pool::answer_to(Session& session, const Request& request) {
  const bool is_operator = session.user == kOperator;
  if (const auto* reserve = std::get_if<Reserve>(&request)) {
    const Job& job = jobs_.reserve(session.user, *reserve);
    session.leases.push_back(job.lease);
    return Reserved{job.lease, job.assignment.share.cores, job.assignment.share.memory};
  }
  if (const auto* begin = std::get_if<Begin>(&request)) {
    const Bytes secret = seal_secret(session.key, begin->lease, begin->secret);
    jobs_.begin(session.user, *begin, std::string(as_text(secret)));
    return Begun{};
  }
  if (const auto* end = std::get_if<End>(&request)) return Ended{jobs_.end(session.user, end->job, is_operator)};
  return Listed{list_for(jobs_, session.user, is_operator)};
}

void Pool::close(Sessions::iterator session) {
  {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t lease : session->leases) jobs_.cancel(lease);
  }
  sessions_.erase(session);
}

void Pool::watch_jobs() {
  if (look_.is_set() || !jobs_.are_there()) return;
  look_ = loop_.every(kLook_s, [this] {
    const std::lock_guard lock(mutex_);
    jobs_.look();
    if (!jobs_.are_there()) look_ = {};
  });
}

void Pool::on_signal() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    if (info.ssi_signo != SIGHUP) {
      ended_by_ = static_cast<int>(info.ssi_signo);
      const std::lock_guard lock(mutex_);
      if (ended_by_ == SIGINT) jobs_.end_all();
      continue;
    }
    try {
      read_users();
      std::fputs("bps-server: the keys have been read again\n", stderr);
    } catch (const Error& error) {
      std::fprintf(stderr, "bps-server: the keys are what they were: %s\n", error.what());
    }
  }
}

MetricFamilies Pool::metrics() const {
  const std::lock_guard lock(mutex_);
  return pool_families(jobs_, {refused_requests_, listener_ ? listener_->refused() : 0});
}

}  // namespace bps::pool
