// SPDX-License-Identifier: Apache-2.0
// Listens and connects: these are the parts of listener.h that need no loop.
#include <fcntl.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/limits.h"
#include "transport/listener.h"

namespace bps::transport {
namespace {

constexpr int kBacklog = 1024;  // a whole job may call at the same moment

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

std::string with_port(const std::string& host, std::uint16_t port) {
  const std::string shown = host.find(':') == std::string::npos ? host : "[" + host + "]";
  return shown + ":" + std::to_string(port);
}

// Returns every address of a host, IPv4 first: "localhost" then means 127.0.0.1 for callers and listeners alike.
std::vector<Address> resolve(const std::string& host, std::uint16_t port, int flags, ErrorCode code) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (failed != 0) {
    throw UnresolvedError(code, "cannot resolve '" + host + "': " + ::gai_strerror(failed),
                          "check the name, or give an IPv4 or IPv6 address");
  }
  std::vector<Address> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
      if (entry->ai_family != family) continue;
      Address& address = addresses.emplace_back();
      std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
      address.size = entry->ai_addrlen;
    }
  }
  ::freeaddrinfo(found);
  return addresses;
}

Address local_address(const std::string& name, ErrorCode code) {
  Address address;
  auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
  if (name.size() + 1 > sizeof local->sun_path) {
    throw Error(code, "the socket name '" + name + "' is too long", "use a name of 107 characters at most");
  }
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path + 1, name.data(), name.size());  // the leading zero makes it abstract
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd open_socket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Returns an empty Fd, with errno, when it fails.
Fd try_listen(const Address& address) {
  Fd socket = open_socket(address.family());
  if (!socket) return {};
  const int one = 1;
  const int zero = 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);  // the next job may start at once
  if (address.family() == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
  if (::bind(socket.get(), address.get(), address.size) != 0 || ::listen(socket.get(), kBacklog) != 0) return {};
  return socket;
}

void make_blocking(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
}

// Returns true when the caller of a free port of its own range has met itself: TCP lets both ends be one socket.
bool is_own_echo(int fd) {
  Address here, there;
  here.size = there.size = sizeof here.storage;
  if (::getsockname(fd, here.get(), &here.size) != 0 || ::getpeername(fd, there.get(), &there.size) != 0) return true;
  return here.size == there.size && std::memcmp(&here.storage, &there.storage, here.size) == 0;
}

// Leaves the port to connect(), so that connections to different peers may share one. Returns 0, or the errno.
int bind_source(int fd, const std::string& from) {
  if (from.empty()) return 0;
  const int on = 1;
  ::setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
  for (const Address& address : resolve(from, 0, AI_NUMERICHOST, ErrorCode::kUnreachable)) {
    if (::bind(fd, address.get(), address.size) == 0) return 0;
  }
  return errno;
}

// Returns 0, or the errno that says why not.
int try_connect(int fd, const Address& address, const Deadline& deadline) {
  if (::connect(fd, address.get(), address.size) != 0 && errno != EINPROGRESS && errno != EINTR) return errno;
  pollfd wait{fd, POLLOUT, 0};
  const int ready = poll_until(wait, deadline);
  if (ready == 0) return ETIMEDOUT;
  int error = 0;
  socklen_t size = sizeof error;
  if (ready < 0 || ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error == 0 && is_own_echo(fd) ? ECONNREFUSED : error;
}

}  // namespace

Fd Listener::listen_tcp(const std::string& address, std::uint16_t port) {
  std::vector<Address> candidates;
  if (address.empty()) {
    for (const char* any : {"::", "0.0.0.0"}) {  // the second is for machines without IPv6
      for (Address& found : resolve(any, port, AI_PASSIVE | AI_NUMERICHOST, ErrorCode::kInvalidArgument)) {
        candidates.push_back(found);
      }
    }
  } else {
    candidates = resolve(address, port, AI_PASSIVE, ErrorCode::kInvalidArgument);
  }
  const std::string where = address.empty() ? "port " + std::to_string(port) : with_port(address, port);
  int error = 0;
  for (const Address& candidate : candidates) {
    if (Fd socket = try_listen(candidate)) return socket;
    error = errno;
    if (error == EADDRINUSE || error == EACCES) break;
  }
  const std::string reason = std::strerror(error);
  if (error == EADDRINUSE || error == EACCES) {
    throw Error(ErrorCode::kPortTaken, "cannot listen on " + where + ": " + reason,
                "choose a free port, or end the program that uses this one (ss -ltnp shows it)");
  }
  if (error == EADDRNOTAVAIL) {
    throw Error(ErrorCode::kInvalidArgument, "cannot listen on " + where + ": " + reason,
                "give an address of this machine (ip addr lists them), or none to listen on all");
  }
  errno = error;
  throw_errno("cannot listen on " + where);
}

Fd Listener::listen_local(const std::string& name) {
  if (Fd socket = try_listen(local_address(name, ErrorCode::kInvalidArgument))) return socket;
  if (errno == EADDRINUSE) {
    throw Error(ErrorCode::kPortTaken, "the local socket '" + name + "' is taken", "end the process that uses it");
  }
  throw_errno("cannot listen on the local socket '" + name + "'");
}

std::uint16_t Listener::port_of(int fd) {
  Address address;
  address.size = sizeof address.storage;
  if (::getsockname(fd, address.get(), &address.size) != 0) return 0;
  if (address.family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
  if (address.family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
  return 0;
}

Fd connect_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline, const std::string& from) {
  const auto addresses = resolve(host, port, 0, ErrorCode::kUnreachable);
  int error = ETIMEDOUT;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    // An address that swallows packets may not use up the time of those after it.
    const Deadline share = Deadline::after(deadline.left_ms() / 1e3 / static_cast<double>(addresses.size() - i));
    Fd socket = open_socket(addresses[i].family());
    if (!socket && limit_behind(errno)) throw_errno("cannot open a socket");
    error = socket ? bind_source(socket.get(), from) : errno;
    if (error == 0) error = try_connect(socket.get(), addresses[i], share);
    if (error != 0) continue;
    const int one = 1;
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    make_blocking(socket.get());
    return socket;
  }
  throw Error(ErrorCode::kUnreachable,
              "cannot connect to " + with_port(host, port) + (from.empty() ? "" : " from " + from) + ": " +
                  std::strerror(error),
              "check that the process there runs and that no firewall is in between");
}

Fd connect_local(const std::string& name, const Deadline& deadline) {
  const Address address = local_address(name, ErrorCode::kUnreachable);
  for (;;) {
    Fd socket = open_socket(AF_UNIX);
    if (!socket) throw_errno("cannot open a local socket");
    if (::connect(socket.get(), address.get(), address.size) == 0) {
      make_blocking(socket.get());
      return socket;
    }
    const int error = errno;
    if ((error == EAGAIN || error == EINTR) && !deadline.passed()) {  // the listener's queue is full for a moment
      sleep_until(Deadline::after(1e-3));
      continue;
    }
    throw Error(ErrorCode::kUnreachable, "cannot connect to the local socket '" + name + "': " + std::strerror(error),
                "check that the process there runs, in the same network namespace");
  }
}

bool has_unacknowledged(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

bool is_network_silent(int socket) {
  // The first repetition may be due to a single lost packet. The kernel of a peer that is stopped still acknowledges,
  // the probes of a closed window included. Probes go out as well where the route is gone: nothing can be sent then.
  constexpr std::uint32_t kSilence_ms = 500;
  constexpr int kRepeated = 2;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const bool repeats = info.tcpi_unacked > 0 && info.tcpi_retransmits >= kRepeated;
  return (repeats || info.tcpi_probes >= kRepeated) && info.tcpi_last_ack_recv >= kSilence_ms;
}

}  // namespace bps::transport
