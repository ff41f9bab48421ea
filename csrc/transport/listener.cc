// SPDX-License-Identifier: Apache-2.0
#include "transport/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <utility>

#include "core/log.h"
#include "core/threads.h"

namespace bps::transport {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
constexpr double kExpiryPeriod_s = 0.5;
// Unauthenticated peers may hold this many descriptors, and never more than an eighth of what the process may open.
// Members of the job hold theirs for milliseconds.
constexpr std::size_t kMostPending = 1024;
constexpr std::size_t kLeastPending = 32;
// Bounds how many connections are accepted in one turn, so that handshakes under way do not wait for those that begin.
constexpr int kAcceptsPerTurn = 16;
// Bounds how many connections are looked at to find one that is silent, when there is no room.
constexpr int kLooks = 64;

std::size_t most_pending() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kLeastPending;
  return std::clamp(static_cast<std::size_t>(limit.rlim_cur / 8), kLeastPending, kMostPending);
}

bool is_local_socket(int fd) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

const Credentials& no_credentials() {
  static const Credentials none;
  return none;
}

Fd open_reserve() {
  return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

}  // namespace

Listener::Listener(EventLoop& loop, Fd listener, const Credentials& credentials, Enter enter)
    : Listener(loop, std::move(listener), credentials, nullptr, std::move(enter)) {}

Listener::Listener(EventLoop& loop, Fd listener, CredentialsOf choose, Enter enter)
    : Listener(loop, std::move(listener), no_credentials(), std::move(choose), std::move(enter)) {}

Listener::Listener(EventLoop& loop, Fd listener, const Credentials& credentials, CredentialsOf choose, Enter enter)
    : loop_(loop),
      listener_(std::move(listener)),
      reserve_(open_reserve()),
      credentials_(credentials),
      choose_(std::move(choose)),
      enter_(std::move(enter)),
      is_local_(is_local_socket(listener_.get())),
      most_pending_(most_pending()) {
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { accept_some(); });
}

Listener::~Listener() {
  close();
}

void Listener::close() {
  if (listener_) loop_.forget(listener_.get());
  listener_.reset();
  while (!pending_.empty()) close_pending(pending_.begin());
  expiry_ = {};
}

void Listener::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn && listener_ && accept_one(); ++i) {
  }
}

// Returns false when nobody waits.
bool Listener::accept_one() {
  Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket) {
    if (errno == EINTR || errno == ECONNABORTED) return true;
    if (errno == EMFILE || errno == ENFILE) refuse_for_lack_of_descriptors();
    return false;
  }
  if (is_local_ && !is_of_this_user(socket.get())) {
    ++refused_;
    return true;
  }
  const int one = 1;
  if (!is_local_) ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (pending_.size() >= most_pending_) make_room();
  if (pending_.empty()) {
    expiry_ = loop_.every(kExpiryPeriod_s, [this] { expire_pending(); });
    expired_at_ = Clock::now();
  }
  const int fd = socket.get();
  const auto pending =
      pending_.insert(pending_.end(), {ServerHandshake(std::move(socket), credentials_, choose_), Clock::now()});
  loop_.watch(fd, EPOLLIN, [this, pending](std::uint32_t) { advance(pending); });
  advance(pending);  // most clients have said hello by now
  return true;
}

// The kernel vouches for the peer's user. Root may do everything with this process anyway.
bool Listener::is_of_this_user(int fd) const {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == 0;
}

// Rejects a connection by means of the reserve. It would stay in the queue and wake the loop for ever.
void Listener::refuse_for_lack_of_descriptors() {
  ++refused_;
  if (!pending_.empty()) return make_room();  // the next turn accepts it
  reserve_.reset();
  Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
  reserve_ = open_reserve();
}

void Listener::make_room() {
  auto silent = pending_.begin();
  for (int i = 0; i < kLooks && silent != pending_.end() && silent->handshake.has_heard(); ++i) ++silent;
  const bool found = silent != pending_.end() && !silent->handshake.has_heard();
  close_pending(found ? silent : pending_.begin());
}

void Listener::advance(Pending::iterator pending) {
  switch (pending->handshake.advance()) {
    case ServerHandshake::State::kPending: return;
    case ServerHandshake::State::kRefused: close_pending(pending); return;
    case ServerHandshake::State::kAccepted: break;
  }
  loop_.forget(pending->handshake.fd());
  AuthenticatedSocket socket = pending->handshake.take();
  pending_.erase(pending);
  enter_(std::move(socket));
}

void Listener::close_pending(Pending::iterator pending) {
  loop_.forget(pending->handshake.fd());
  pending_.erase(pending);
  ++refused_;
}

void Listener::expire_pending() {
  const auto now = Clock::now();
  // This process was stopped itself, and what it has not read yet may have come in time.
  if (now - std::exchange(expired_at_, now) > 2 * to_duration(kExpiryPeriod_s)) {
    for (PendingConnection& pending : pending_) pending.since = now;
  }
  const auto before = now - kPatience;
  while (!pending_.empty() && pending_.front().since <= before) close_pending(pending_.begin());
  if (pending_.empty()) expiry_ = {};
}

ListenerLoop::ListenerLoop() : thread_(start_thread([this] { run(); })) {}

ListenerLoop::~ListenerLoop() {
  stopping_ = true;
  loop_.wake();
  thread_.join();
}

void ListenerLoop::run() {
  name_thread("bps-listener");
  while (!stopping_) {
    try {
      loop_.turn(std::chrono::hours(1));
    } catch (const std::exception& error) {  // the failure is that of one connection: the next may do better
      log_warning(std::string("a listener failed: ") + error.what());
    }
  }
}

void ListenerLoop::call(std::function<void()> task) {
  const auto packaged = std::make_shared<std::packaged_task<void()>>(std::move(task));
  loop_.post([packaged] { (*packaged)(); });
  packaged->get_future().get();
}

}  // namespace bps::transport
