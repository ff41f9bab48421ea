// SPDX-License-Identifier: Apache-2.0
#include "transport/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/error.h"

namespace bps::transport {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
// Unauthenticated peers may hold this many descriptors; members of the job stay for milliseconds.
constexpr std::size_t kMostPending = 1024;

}  // namespace

Listener::Listener(EventLoop& loop, Fd listener, const Credentials& credentials, Enter enter)
    : loop_(loop), listener_(std::move(listener)), credentials_(credentials), enter_(std::move(enter)) {
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  listen();
  expiry_ = loop_.every(1.0, [this] { expire_pending(); });
}

Listener::~Listener() {
  close();
}

void Listener::close() {
  if (listening_) loop_.forget(listener_.get());
  listening_ = false;
  listener_.reset();
  while (!pending_.empty()) close_pending(pending_.begin()->first);
}

void Listener::listen() {
  loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { accept_all(); });
  listening_ = true;
}

void Listener::accept_all() {
  while (listener_) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // The caller stays in the queue and would wake the loop for ever: look away until the next second.
        loop_.forget(listener_.get());
        listening_ = false;
      }
      return;
    }
    const int one = 1;
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);  // fails on a Unix socket: no matter
    if (pending_.size() >= kMostPending) make_room();
    const int fd = socket.get();
    pending_[fd] = {std::make_unique<ServerHandshake>(std::move(socket), credentials_), Clock::now()};
    loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { advance(fd); });
    advance(fd);  // most callers have said hello by now
  }
}

void Listener::make_room() {
  const auto older = [](const auto& a, const auto& b) { return a.second.since < b.second.since; };
  close_pending(std::min_element(pending_.begin(), pending_.end(), older)->first);
}

void Listener::advance(int fd) {
  const auto pending = pending_.find(fd);
  if (pending == pending_.end()) return;
  switch (pending->second.handshake->advance()) {
    case ServerHandshake::State::kPending: return;
    case ServerHandshake::State::kRefused: close_pending(fd); return;
    case ServerHandshake::State::kAccepted: break;
  }
  const std::unique_ptr<ServerHandshake> handshake = std::move(pending->second.handshake);
  pending_.erase(pending);
  loop_.forget(fd);
  enter_(handshake->take(), handshake->hello());
}

void Listener::close_pending(int fd) {
  loop_.forget(fd);
  pending_.erase(fd);
  ++refused_;
}

void Listener::expire_pending() {
  const auto before = Clock::now() - kPatience;
  std::vector<int> silent;
  for (const auto& [fd, pending] : pending_) {
    if (pending.since <= before) silent.push_back(fd);
  }
  for (const int fd : silent) close_pending(fd);
  if (listener_ && !listening_) listen();
}

}  // namespace bps::transport
