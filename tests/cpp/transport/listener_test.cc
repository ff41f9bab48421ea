// SPDX-License-Identifier: Apache-2.0
#include "transport/listener.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "child_process.h"
#include "core/port_range.h"
#include "eventually.h"
#include "reserved_port.h"
#include "transport/handshake_messages.h"

namespace bps::transport {
namespace {

const Credentials kJob = Credentials::from("job", "secret");

// A listener on a thread of its own.
class House {
 public:
  explicit House(Fd listener) {
    listener_ = std::make_unique<Listener>(loop_, std::move(listener), kJob, [this](AuthenticatedSocket&& socket) {
      refused_before = refused();
      last_node = socket.hello.node;
      pending_.push_back(std::move(socket.socket));
      ++entered;
    });
    thread_ = std::thread([this] {
      while (!stopping_) loop_.turn(std::chrono::seconds(1));
    });
  }
  ~House() {
    stopping_ = true;
    loop_.wake();
    thread_.join();
  }
  std::uint64_t refused() const { return listener_->refused(); }
  void close() {
    std::atomic<bool> closed{false};
    loop_.post([&] {
      listener_->close();
      closed = true;
    });
    while (!closed) std::this_thread::yield();
  }

  std::atomic<int> entered{0};
  std::atomic<std::uint32_t> last_node{0};
  std::atomic<std::uint64_t> refused_before{0};  // when the last one entered

 private:
  EventLoop loop_;
  std::unique_ptr<Listener> listener_;
  std::vector<Fd> pending_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

void call(int fd, std::uint32_t node, const Credentials& credentials = kJob) {
  client_handshake(fd, {.node = node}, credentials, Deadline::after(5), "the house");
}

bool has_ipv6() {
  const Fd probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 loopback{};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  return probe && ::bind(probe.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback) == 0;
}

TEST(Listener, LetsMembersInOverEveryFamily) {
  Fd listener = Listener::listen_tcp("", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  ASSERT_NE(port, 0);
  House house(std::move(listener));
  std::vector<std::string> hosts{"127.0.0.1", "localhost"};
  if (has_ipv6()) hosts.push_back("::1");
  std::uint32_t node = 0;
  for (const std::string& host : hosts) {
    const Fd socket = connect_tcp(host, port, Deadline::after(5));
    call(socket.get(), ++node);
    ASSERT_TRUE(eventually([&] { return house.last_node == node; })) << host;
    EXPECT_EQ(::fcntl(socket.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(socket.get(), F_GETFD) & FD_CLOEXEC, 0);
    int no_delay = 0;
    socklen_t size = sizeof no_delay;
    EXPECT_EQ(::getsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &no_delay, &size), 0);
    EXPECT_NE(no_delay, 0);
  }
  EXPECT_EQ(house.refused(), 0U);
}

TEST(Listener, LetsMembersInOverALocalSocket) {
  const std::string name = "bps-listener-test-" + std::to_string(::getpid());
  House house(Listener::listen_local(name));
  const Fd socket = connect_local(name, Deadline::after(5));
  call(socket.get(), 5);
  EXPECT_TRUE(eventually([&] { return house.entered == 1; }));
  EXPECT_THROW(Listener::listen_local(name), Error);
  EXPECT_THROW(connect_local(name + "-not", Deadline::after(1)), Error);
  EXPECT_THROW(connect_local(std::string(200, 'x'), Deadline::after(1)), Error);
}

TEST(Listener, SendsStrangersAway) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  House house(std::move(listener));
  {
    const Fd garbage = connect_tcp("127.0.0.1", port, Deadline::after(5));
    ASSERT_GT(::send(garbage.get(), "GET / HTTP/1.0\r\n\r\n", 18, 0), 0);
    char byte = 0;
    EXPECT_LE(::recv(garbage.get(), &byte, 1, 0), 0) << "closed, without an answer";
  }
  for (const auto& other : {Credentials::from("job", "wrong"), Credentials::from("other", "secret")}) {
    const Fd socket = connect_tcp("127.0.0.1", port, Deadline::after(5));
    EXPECT_THROW(call(socket.get(), 1, other), HandshakeError);
  }
  EXPECT_TRUE(eventually([&] { return house.refused() == 3; }));
  EXPECT_EQ(house.entered, 0);
}

// As a process that is stopped between connect() and its hello.
TEST(Listener, WhoWasStoppedMeanwhileConnectsAgain) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  House house(std::move(listener));
  int connects = 0;
  const auto connect = [&] {
    Fd socket = connect_tcp("127.0.0.1", port, Deadline::after(20));
    if (++connects == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3500));
    return socket;
  };
  const GreetedSocket greeted = connect_and_shake(connect, {.node = 7}, kJob, Deadline::after(20), "the house");
  EXPECT_EQ(connects, 2);
  EXPECT_TRUE(eventually([&] { return house.last_node == 7; }));
}

TEST(Listener, WhoIsSentAwayAtOnceDoesNotTryAgain) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  int connects = 0;
  const auto connect = [&] {
    ++connects;
    Fd socket = connect_tcp("127.0.0.1", Listener::port_of(listener.get()), Deadline::after(5));
    Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
    return socket;
  };
  EXPECT_THROW(connect_and_shake(connect, {}, kJob, Deadline::after(20), "the house"), HandshakeError);
  EXPECT_EQ(connects, 1);
}

// What came while the listener's process was stopped is in its sockets when it goes on, and its timer is due.
TEST(Listener, ACallerHasNotBeenSilentWhileTheListenerWasStopped) {
  const ReservedPort reserved;
  const std::uint16_t port = reserved.number();
  const ChildProcess child([port] {
    House house(Listener::listen_tcp("127.0.0.1", port));
    stay();
  });
  Fd socket;
  EXPECT_TRUE(eventually([&] {
    try {
      socket = connect_tcp("127.0.0.1", port, Deadline::after(1));
    } catch (const Error&) {  // it has not begun yet
    }
    return static_cast<bool>(socket);
  }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has been accepted
  child.stop();
  std::thread caller([&] { EXPECT_NO_THROW(call(socket.get(), 7)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  child.signal(SIGCONT);
  caller.join();
}

TEST(Listener, AHundredSilentCallersDelayNobody) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  House house(std::move(listener));
  std::vector<Fd> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(connect_tcp("127.0.0.1", port, Deadline::after(5)));
  const Fd good = connect_tcp("127.0.0.1", port, Deadline::after(5));
  call(good.get(), 9);
  EXPECT_TRUE(eventually([&] { return house.last_node == 9U; }));
  EXPECT_LT(house.refused_before, 100U) << "it did not wait until all of them had been sent away";
  EXPECT_TRUE(eventually([&] { return house.refused() == 100; }, 10)) << "and after two seconds they are sent away";
}

TEST(Listener, ClosingFreesThePortAndSendsWaitersAway) {
  Fd listener = Listener::listen_tcp("", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  House house(std::move(listener));
  const Fd inside = connect_tcp("127.0.0.1", port, Deadline::after(5));
  call(inside.get(), 1);
  const Fd waiting = connect_tcp("127.0.0.1", port, Deadline::after(5));
  house.close();
  char byte = 0;
  EXPECT_LE(::recv(waiting.get(), &byte, 1, 0), 0);
  EXPECT_THROW(connect_tcp("127.0.0.1", port, Deadline::after(1)), Error);
  EXPECT_NO_THROW(Listener::listen_tcp("", port)) << "although a connection of the old listener lives on";
}

// The limit on open files of this process, until the end of the block.
class FileLimit {
 public:
  explicit FileLimit(rlim_t soft) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit lower{soft, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &lower), 0);
  }
  ~FileLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

// A client that says hello and then hesitates is not sent away for those that come after it and say nothing.
TEST(Listener, WhoHasSaidNothingMakesRoom) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  const auto small = std::make_unique<FileLimit>(256);  // room for 32
  House house(std::move(listener));
  const Fd slow = connect_tcp("127.0.0.1", port, Deadline::after(5));
  const ClientHello hello{.preamble = Preamble(HandshakeKind::kHello, Plane::kVan), .hello = {}, .job = kJob.job};
  const auto said = codec::encode(hello);
  ASSERT_EQ(::send(slow.get(), said.data(), said.size(), 0), static_cast<ssize_t>(said.size()));
  std::array<std::byte, codec::kSize<Challenge>> answer{};
  ASSERT_EQ(::recv(slow.get(), answer.data(), answer.size(), MSG_WAITALL), static_cast<ssize_t>(answer.size()));
  std::vector<Fd> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(connect_tcp("127.0.0.1", port, Deadline::after(5)));
  ASSERT_TRUE(eventually([&] { return house.refused() >= 69; }));
  char byte = 0;
  EXPECT_LT(::recv(slow.get(), &byte, 1, MSG_DONTWAIT), 0) << "still open";
  EXPECT_EQ(errno, EAGAIN);
  const Fd good = connect_tcp("127.0.0.1", port, Deadline::after(5));
  call(good.get(), 3);
  EXPECT_TRUE(eventually([&] { return house.last_node == 3U; }));
}

TEST(Listener, WithoutDescriptorsConnectionsAreRejectedAndItGoesOn) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  House house(std::move(listener));
  std::vector<Fd> clients;
  for (int i = 0; i < 5; ++i) clients.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  {
    const Fd lowest_free(::dup(clients[0].get()));
    const FileLimit none_left(static_cast<rlim_t>(lowest_free.get()) + 1);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (const Fd& client : clients) {
      ASSERT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
      char byte = 0;
      EXPECT_LE(::recv(client.get(), &byte, 1, 0), 0) << "rejected, not left waiting";
    }
  }
  EXPECT_EQ(house.refused(), 5U);
  const Fd good = connect_tcp("127.0.0.1", port, Deadline::after(5));
  call(good.get(), 3);
  EXPECT_TRUE(eventually([&] { return house.last_node == 3U; }));
}

TEST(Listener, ATakenPortIsSaidToBeTaken) {
  const Fd first = Listener::listen_tcp("", 0);
  const std::uint16_t port = Listener::port_of(first.get());
  for (const char* address : {"", "127.0.0.1"}) {
    try {
      const Fd second = Listener::listen_tcp(address, port);
      ADD_FAILURE() << "listens twice on " << port;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPortTaken);
      EXPECT_NE(std::string(error.what()).find(std::to_string(port)), std::string::npos) << error.what();
    }
  }
}

TEST(Listener, TakesTheFirstFreePortOfARange) {
  Fd taken, free;
  std::uint16_t port = 0;
  // Two neighbours that are free; others of this machine take ports as well.
  for (int i = 0; i < 100 && !free; ++i) {
    taken = Listener::listen_tcp("127.0.0.1", 0);
    port = Listener::port_of(taken.get());
    try {
      free = Listener::listen_tcp("127.0.0.1", static_cast<std::uint16_t>(port + 1));
    } catch (const Error&) {  // it is not
    }
  }
  ASSERT_TRUE(free);
  const PortRange ports{port, static_cast<std::uint16_t>(port + 1)};
  const auto listen = [](std::uint16_t one) { return Listener::listen_tcp("127.0.0.1", one); };
  try {
    const Fd none = listen_within(ports, listen);
    ADD_FAILURE() << "both are taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kPortTaken);
    EXPECT_NE(std::string(error.what()).find("all ports of BPS_PORTS=" + std::to_string(port)), std::string::npos);
  }
  free.reset();
  EXPECT_EQ(Listener::port_of(listen_within(ports, listen).get()), port + 1);
  EXPECT_NE(Listener::port_of(listen_within(PortRange{}, listen).get()), 0) << "any";
}

TEST(Listener, BadAddressesAreNamed) {
  for (const char* address : {"no such host.invalid", "192.0.2.1"}) {
    try {
      const Fd socket = Listener::listen_tcp(address, 0);
      ADD_FAILURE() << "listens on " << address;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_NE(std::string(error.what()).find(address), std::string::npos) << error.what();
      EXPECT_FALSE(error.hint().empty());
    }
  }
}

TEST(Listener, NobodyThereIsUnreachable) {
  Fd listener = Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = Listener::port_of(listener.get());
  listener.reset();
  // Often enough that the kernel picks the free port itself as the caller's: that must not count as connected.
  for (int i = 0; i < 200; ++i) {
    try {
      const Fd socket = connect_tcp("127.0.0.1", port, Deadline::after(1));
      ADD_FAILURE() << "connected to nobody";
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kUnreachable) << error.what();
    }
  }
}

}  // namespace
}  // namespace bps::transport
