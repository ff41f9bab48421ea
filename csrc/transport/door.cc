#include "transport/door.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/error.h"

namespace bps {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
// Strangers may hold this many descriptors; real callers stay for milliseconds.
constexpr std::size_t kMostGuests = 1024;

}  // namespace

Door::Door(EventLoop& loop, Fd listener, const Credentials& credentials, Enter enter)
    : loop_(loop),
      listener_(std::move(listener)),
      credentials_(credentials),
      enter_(std::move(enter)),
      alive_(std::make_shared<bool>(true)) {
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  listen();
  loop_.every(1.0, [this, alive = std::weak_ptr(alive_)] {
    if (!alive.expired()) drop_silent();
  });
}

Door::~Door() {
  close();
}

void Door::close() {
  if (listening_) loop_.forget(listener_.get());
  listening_ = false;
  listener_.reset();
  while (!guests_.empty()) dismiss(guests_.begin()->first);
}

void Door::listen() {
  loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { accept_all(); });
  listening_ = true;
}

void Door::accept_all() {
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
    if (guests_.size() >= kMostGuests) make_room();
    const int fd = socket.get();
    guests_[fd] = {std::make_unique<Greeter>(std::move(socket), credentials_), Clock::now()};
    loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { advance(fd); });
    advance(fd);  // most callers have said hello by now
  }
}

void Door::make_room() {
  const auto older = [](const auto& a, const auto& b) { return a.second.since < b.second.since; };
  dismiss(std::min_element(guests_.begin(), guests_.end(), older)->first);
}

void Door::advance(int fd) {
  const auto guest = guests_.find(fd);
  if (guest == guests_.end()) return;
  switch (guest->second.greeter->advance()) {
    case Greeter::State::kPending: return;
    case Greeter::State::kRefused: dismiss(fd); return;
    case Greeter::State::kAccepted: break;
  }
  const std::unique_ptr<Greeter> greeter = std::move(guest->second.greeter);
  guests_.erase(guest);
  loop_.forget(fd);
  enter_(greeter->take(), greeter->hello());
}

void Door::dismiss(int fd) {
  loop_.forget(fd);
  guests_.erase(fd);
  ++refused_;
}

void Door::drop_silent() {
  const auto before = Clock::now() - kPatience;
  std::vector<int> silent;
  for (const auto& [fd, guest] : guests_) {
    if (guest.since <= before) silent.push_back(fd);
  }
  for (const int fd : silent) dismiss(fd);
  if (listener_ && !listening_) listen();
}

}  // namespace bps
