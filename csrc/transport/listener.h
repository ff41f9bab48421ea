// SPDX-License-Identifier: Apache-2.0
// Accepts connections on a listening socket, runs their handshakes without blocking, and hands over those that have
// proved to belong to the job. A connection is closed and counted when it is refused, or when its handshake is not
// finished within two seconds.
//
// Unauthenticated peers cost little, however many come. At most kMostPending descriptors are open for them, fewer where
// the process may open few. The listener has a loop of its own (ListenerLoop), on which neither heartbeats nor data
// depend. When there is no room, the pending connection that has been silent for longest makes room: members of the job
// say hello at once. On a local socket, processes of other users are rejected before a byte is read.
//
// A listener belongs to the thread of its event loop, except refused(). `enter` must not destroy the listener.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/event_loop.h"
#include "core/fd.h"
#include "transport/handshake.h"

namespace bps::transport {

class Listener {
 public:
  using Enter = std::function<void(AuthenticatedSocket&&)>;

  // Listens by TCP on `address` ("": every interface, IPv6 and IPv4) and `port` (0: any). Throws kPortTaken, or
  // kInvalidArgument when the address is not one of this machine's.
  static Fd listen_tcp(const std::string& address, std::uint16_t port);
  // Listens on a Unix stream socket in the abstract namespace: nothing is left in the file system afterwards.
  static Fd listen_local(const std::string& name);
  static std::uint16_t port_of(int fd);

  // `credentials` may change between two connections, on the loop's thread.
  Listener(EventLoop& loop, Fd listener, const Credentials& credentials, Enter enter);
  // `choose` runs on the loop's thread.
  Listener(EventLoop& loop, Fd listener, CredentialsOf choose, Enter enter);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Stops listening, which frees the port, and closes the pending connections.
  void close();
  // Returns how many connections were refused. May be called from any thread.
  std::uint64_t refused() const { return refused_; }

 private:
  Listener(EventLoop& loop, Fd listener, const Credentials& credentials, CredentialsOf choose, Enter enter);

  struct PendingConnection {
    ServerHandshake handshake;
    Clock::time_point since;
  };
  using Pending = std::list<PendingConnection>;  // the oldest first

  void accept_some();
  bool accept_one();
  bool is_of_this_user(int fd) const;
  void refuse_for_lack_of_descriptors();
  void make_room();
  void advance(Pending::iterator pending);
  void close_pending(Pending::iterator pending);
  void expire_pending();

  EventLoop& loop_;
  Fd listener_;
  Fd reserve_;  // closed for a moment to reject a connection when this process can open no more descriptors
  const Credentials& credentials_;
  const CredentialsOf choose_;
  const Enter enter_;
  const bool is_local_;
  const std::size_t most_pending_;
  Pending pending_;
  std::atomic<std::uint64_t> refused_{0};
  Timer expiry_;                  // set while connections are pending
  Clock::time_point expired_at_;  // when expiry_ came last, or was set
};

// Runs an event loop on a thread of its own, for the listeners of a process.
class ListenerLoop {
 public:
  ListenerLoop();
  ~ListenerLoop();
  ListenerLoop(const ListenerLoop&) = delete;
  ListenerLoop& operator=(const ListenerLoop&) = delete;

  EventLoop& loop() { return loop_; }
  // Runs `task` on the loop and waits for it. Its exceptions come back to the caller, which must be another thread.
  void call(std::function<void()> task);

 private:
  void run();

  EventLoop loop_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Means that a name leads nowhere, as far as is known at this moment.
class UnresolvedError : public Error {
 public:
  using Error::Error;
};

// Connects a blocking TCP socket (TCP_NODELAY) to a name or an IPv4/IPv6 address within the deadline, and tries each
// address of the host once. `from` is this host's numeric address, "" for that of the route. Throws kUnreachable.
Fd connect_tcp(const std::string& host, std::uint16_t port, const Deadline& deadline, const std::string& from = "");
Fd connect_local(const std::string& name, const Deadline& deadline);

// Returns true when the other end of a TCP connection has acknowledged nothing for half a second although bytes were
// sent to it again twice. Returns false for other sockets.
bool is_network_silent(int socket);
// Returns true when bytes that were written have not reached the peer's system, or, on a local socket, were not read.
bool has_unacknowledged(int socket);

}  // namespace bps::transport
