// SPDX-License-Identifier: Apache-2.0
// A listening socket that accepts connections, runs their handshakes without blocking, and hands over those that have
// proved to belong to the job. A pending connection that is refused, or whose handshake is not finished within two
// seconds, is closed and counted; it cannot hold up the others.
//
// Threading: belongs to the thread of its event loop, except refused(). `enter` must not destroy the listener.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "core/event_loop.h"
#include "core/fd.h"
#include "transport/handshake.h"

namespace bps::transport {

class Listener {
 public:
  using Enter = std::function<void(Fd, const Hello&)>;

  // TCP on `address` ("" = every interface, IPv6 and IPv4) and `port` (0 = any). Throws kPortTaken, or
  // kInvalidArgument when the address is not one of this machine's.
  static Fd listen_tcp(const std::string& address, std::uint16_t port);
  // A Unix stream socket in the abstract namespace: nothing is left in the file system, whatever ends the process.
  static Fd listen_local(const std::string& name);
  static std::uint16_t port_of(int fd);

  Listener(EventLoop& loop, Fd listener, const Credentials& credentials, Enter enter);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Stops listening, which frees the port, and sends away who has not entered yet.
  void close();
  // Callers sent away; from any thread.
  std::uint64_t refused() const { return refused_; }

 private:
  struct PendingConnection {
    std::unique_ptr<ServerHandshake> handshake;
    Clock::time_point since;
  };

  void listen();
  void accept_all();
  void make_room();
  void advance(int fd);
  void close_pending(int fd);
  void expire_pending();

  EventLoop& loop_;
  Fd listener_;
  const Credentials& credentials_;
  Enter enter_;
  std::unordered_map<int, PendingConnection> pending_;
  bool listening_ = false;
  std::atomic<std::uint64_t> refused_{0};
  Timer expiry_;
};

// Connects a blocking TCP socket (TCP_NODELAY) within the deadline; name or IPv4/IPv6 address. One attempt per address
// of the host. Throws kUnreachable.
Fd connect_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline);
Fd connect_local(const std::string& name, const Deadline& deadline);

}  // namespace bps::transport
