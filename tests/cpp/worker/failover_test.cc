// SPDX-License-Identifier: Apache-2.0
// Two worker loops and a server loop in one thread, joined by TCP over two rails: two addresses of the loopback
// interface. Connections of one rail break at every point of a round, at either end, and what the callers see is exact.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "eventually.h"
#include "server/server_loop.h"
#include "transport/listener.h"
#include "transport/reactor.h"
#include "transport/tcp/tcp_transport.h"
#include "van/members.h"
#include "worker/worker_loop.h"

namespace bps::worker::testing {
namespace {

using transport::Plane;
using transport::tcp::TcpRail;
using transport::tcp::TcpTransport;

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint64_t kPieceBytes = 100'000;
constexpr std::uint32_t kPieces = 12;
constexpr std::uint64_t kBytes = kPieceBytes * kPieces;
constexpr std::size_t kPad = 512;
constexpr const char* kRails[] = {"127.0.0.1", "127.0.0.2"};

std::vector<TcpRail> rails() {
  return {{kRails[0], "lo", 0}, {kRails[1], "lo", 0}};
}

std::string host_of(int (*which)(int, sockaddr*, socklen_t*), int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  if (which(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 || address.sin_family != AF_INET) return "";
  char text[INET_ADDRSTRLEN] = {};
  return ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
}

std::uint16_t port_of(int (*which)(int, sockaddr*, socklen_t*), int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  return which(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 ? ntohs(address.sin_port) : std::uint16_t{0};
}

struct One {
  transport::Reactor reactor{"worker", transport::Spin{}};
  std::unique_ptr<TcpTransport> transport;
  std::unique_ptr<WorkerLoop> loop;
  ServerConnection* server = nullptr;
  std::vector<std::pair<std::size_t, std::size_t>> lost;
};

class FailoverTest : public ::testing::Test {
 protected:
  FailoverTest() {
    far = std::make_unique<TcpTransport>(reactor.loop(), credentials, reactor.counters(), transport::tcp::TcpOptions{},
                                         rails());
    server::ServerLoopOptions options{.largest_partition = 1 << 20};
    options.reactor = &reactor;
    server_loop =
        std::make_unique<server::ServerLoop>(options, van::members_with_one_loop(kWorkers),
                                             std::vector<transport::Transport*>{far.get()}, reactor.counters());
    server_loop->add_group(*group);
    std::vector<transport::tcp::TcpAddress> addresses;
    listeners.call([&] {
      for (const char* rail : kRails) {
        Fd socket = transport::Listener::listen_tcp(rail, 0);
        ports.push_back(transport::Listener::port_of(socket.get()));
        addresses.push_back({rail, ports.back(), 0});
        open.push_back(std::make_unique<transport::Listener>(
            listeners.loop(), std::move(socket), credentials, [this](transport::AuthenticatedSocket&& one) {
              const std::lock_guard lock(mutex);
              incoming.push_back(std::make_unique<transport::IncomingSocket>(std::move(one)));
            }));
      }
    });
    const std::string text = transport::tcp::to_text(addresses);
    address.assign(as_bytes(text).begin(), as_bytes(text).end());
    for (std::uint32_t i = 0; i < kWorkers; ++i) join(i);
    // The server must know both rails, each with a connection for control and one for data, before one of them breaks.
    const auto all_accepted = [&] {
      turn();
      return accepted >= 4 * kWorkers;
    };
    EXPECT_TRUE(eventually(all_accepted, 20, kAtOnce));
    for (int i = 0; i < 50; ++i) turn();
  }
  ~FailoverTest() override {
    listeners.call([&] { open.clear(); });
  }

  void join(std::uint32_t i) {
    One& one = workers[i];
    one.transport = std::make_unique<TcpTransport>(one.reactor.loop(), credentials, one.reactor.counters(),
                                                   transport::tcp::TcpOptions{}, rails());
    one.loop = std::make_unique<WorkerLoop>(
        WorkerLoopOptions{.index = 0, .places = 1, .largest_partition = kPieceBytes, .staging_bytes = 1 << 20},
        one.reactor);
    one.loop->events.when_path_lost = [&one](std::size_t place, std::size_t pair) {
      one.lost.emplace_back(place, pair);
    };
    one.server = &one.loop->add_server(0, 99, "server", *one.transport);
    std::vector<ServerPath> paths;
    for (std::uint16_t pair = 0; pair < 2; ++pair)
      paths.push_back(connect(i, static_cast<std::uint16_t>(pair + 1), pair));
    one.loop->open(*one.server, std::move(paths));
  }
  ServerPath connect(std::uint32_t i, std::uint16_t id, std::size_t pair) {
    One& one = workers[i];
    transport::ConnectRequest request{.address = address,
                                      .hello = {.node = i + 1},
                                      .deadline = Deadline::after(10),
                                      .whom = "server",
                                      .connection = pair};
    request.hello.path = id;
    ServerPath path{.id = id, .pair = pair};
    path.control = one.transport->attach(one.transport->connect_control(request), *one.server);
    path.data.push_back(one.transport->attach(one.transport->connect_data(request), *one.server));
    return path;
  }

  void turn() {
    std::vector<std::unique_ptr<transport::IncomingConnection>> arrived;
    {
      const std::lock_guard lock(mutex);
      arrived.swap(incoming);
    }
    accepted += arrived.size();
    for (auto& one : arrived) server_loop->accept(std::move(one), far.get());
    for (One& one : workers) {
      one.reactor.loop().turn(Duration::zero());
      one.transport->poll();
      one.loop->step();
    }
    reactor.loop().turn(Duration::zero());
    far->poll();
    server_loop->step();
  }

  // A round of both workers, in place. After `break_after` turns the connections of a rail break.
  template <typename Break>
  void run_round(std::uint32_t round, int break_after, Break&& breaks) {
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::uint32_t i = 0; i < kWorkers; ++i) operations.push_back(submit(i, round));
    const auto all_done = [&] {
      for (const auto& operation : operations) {
        if (!operation->is_done()) return false;
      }
      return true;
    };
    int turns = 0;
    const auto goes_on_until_done = [&] {
      if (all_done()) return true;
      if (turns++ == break_after) breaks();
      turn();
      return false;
    };
    ASSERT_TRUE(eventually(goes_on_until_done, 30, kAtOnce)) << "round " << round << " hangs";
    if (turns <= break_after) breaks();  // between two rounds
    for (const auto& operation : operations) ASSERT_NO_THROW(operation->rethrow());
    expect_sums(round);
  }
  std::shared_ptr<Operation> submit(std::uint32_t i, std::uint32_t round) {
    std::vector<std::byte>& memory = memories[i];
    memory.assign(kBytes + 2 * kPad, std::byte{0xee});
    const std::vector<std::byte> input = bytes_of(round, i + 1);
    std::memcpy(memory.data() + kPad, input.data(), kBytes);
    auto tensor = std::make_shared<Tensor>(tensor::Partitioning(kBytes, 1, kPieceBytes),
                                           tensor::Partitioning(kBytes, 1, kPieceBytes));
    tensor->name = "tensor";
    tensor->id = 1;
    tensor->group = group;
    tensor->position = static_cast<std::uint16_t>(i);
    tensor->dtype = Dtype::kUint8;
    tensor->bytes = kBytes;
    tensor->plans.whole.resize(1);
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) tensor->plans.whole[0].push_back({piece});
    Request request;
    request.input = request.output = memory.data() + kPad;
    request.input_allocation = request.output_allocation = {memory, 1000 * (round + 1ULL) + i};
    auto operation = std::make_shared<Operation>(tensor, request, round, round, 1, 1);
    workers[i].loop->submit(operation, true);
    return operation;
  }
  // Without a look at each byte, of which there are 200 million: the sanitizers would take a minute. Seven bytes repeat
  // within a piece.
  static std::vector<std::byte> bytes_of(std::uint32_t round, std::uint64_t factor) {
    std::vector<std::byte> bytes(kBytes);
    for (std::uint64_t piece = 0; piece < kPieces; ++piece) {
      std::byte* const begin = bytes.data() + piece * kPieceBytes;
      for (std::uint64_t i = 0; i < 7; ++i) begin[i] = static_cast<std::byte>(factor * ((piece + i + round) % 40));
      for (std::uint64_t n = 7; n < kPieceBytes; n *= 2) std::memcpy(begin + n, begin, std::min(n, kPieceBytes - n));
    }
    return bytes;
  }
  void expect_sums(std::uint32_t round) {
    const std::vector<std::byte> sums = bytes_of(round, 3);
    const std::vector<std::byte> pad(kPad, std::byte{0xee});
    for (const std::vector<std::byte>& memory : memories) {
      const std::byte* const begin = memory.data();
      ASSERT_EQ(std::memcmp(begin + kPad, sums.data(), kBytes), 0) << "round " << round;
      ASSERT_EQ(std::memcmp(begin, pad.data(), kPad), 0);
      ASSERT_EQ(std::memcmp(begin + kPad + kBytes, pad.data(), kPad), 0);
    }
  }

  // Of the sockets of this process those of a rail, at the workers' end or the server's, receive nothing more. A
  // worker's socket goes to a port that is listened on, a server's comes from one.
  std::size_t break_rail(std::size_t rail, bool at_worker) {
    std::size_t broken = 0;
    for (int fd = 3; fd < 1024; ++fd) {
      const auto listened = at_worker ? port_of(::getpeername, fd) : port_of(::getsockname, fd);
      if (listened != ports[rail] || host_of(::getpeername, fd) != kRails[rail]) continue;
      if (::shutdown(fd, SHUT_RD) == 0) ++broken;
    }
    return broken;
  }

  transport::Credentials credentials{};
  std::shared_ptr<const van::Group> group = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
  transport::Reactor reactor{"server", transport::Spin{}};
  std::unique_ptr<TcpTransport> far;
  std::unique_ptr<server::ServerLoop> server_loop;
  One workers[kWorkers];
  std::vector<std::byte> memories[kWorkers];
  std::vector<std::uint16_t> ports;
  Bytes address;
  std::size_t accepted = 0;
  std::mutex mutex;
  std::vector<std::unique_ptr<transport::IncomingConnection>> incoming;
  transport::ListenerLoop listeners;
  std::vector<std::unique_ptr<transport::Listener>> open;
};

TEST_F(FailoverTest, BothRailsCarryBytes) {
  run_round(0, -1, [] {});
  for (One& one : workers) {
    EXPECT_EQ(one.server->paths.streams().size(), 2U);
    EXPECT_GT(one.server->paths.endpoint(0).received, 0U);
    EXPECT_GT(one.server->paths.endpoint(1).received, 0U);
  }
}

// Every point of a round, at each end, and for both rails: the first one carries the control messages, too.
TEST_F(FailoverTest, ARailThatBreaksCostsNoRound) {
  std::uint32_t round = 0;
  std::uint16_t path = 3;
  std::uint64_t repeated = 0;
  for (int after = 0; after < 10; ++after) {
    for (const bool at_worker : {true, false}) {
      for (const std::size_t rail : {0UL, 1UL}) {
        SCOPED_TRACE("rail " + std::to_string(rail) + (at_worker ? " breaks at the workers" : " breaks at the server") +
                     " after " + std::to_string(after) + " turns");
        run_round(round++, after, [&] { EXPECT_EQ(break_rail(rail, at_worker), 2 * kWorkers); });
        if (HasFatalFailure()) return;
        const auto both_are_told = [&] {
          turn();
          return !workers[0].lost.empty() && !workers[1].lost.empty();
        };
        EXPECT_TRUE(eventually(both_are_told, 10, kAtOnce));
        for (std::uint32_t i = 0; i < kWorkers; ++i) {
          One& one = workers[i];
          ASSERT_EQ(one.lost, (std::vector<std::pair<std::size_t, std::size_t>>{{0, rail}}));
          ASSERT_EQ(one.server->paths.streams().size(), 1U);
          one.lost.clear();
          one.loop->add_path(*one.server, connect(i, path, rail));  // it is back
        }
        ++path;
        run_round(round++, -1, [] {});
        if (HasFatalFailure()) return;
        for (One& one : workers) {
          for (std::size_t i = 0; i < 2; ++i)
            ASSERT_GT(one.server->paths.endpoint(i).received, 0U) << "it is used again";
        }
      }
    }
  }
  for (One& one : workers) repeated += one.reactor.counters().repeated.get();
  EXPECT_GT(repeated, 0U) << "no push was ever under way on the rail that broke";
  EXPECT_GT(reactor.counters().repeated.get(), 0U) << "nor an answer";
  EXPECT_EQ(server_loop->open_rounds(), 0U);
}

TEST_F(FailoverTest, TheLastRailIsAnError) {
  std::vector<std::string> why;
  for (One& one : workers) {
    one.loop->events.when_lost = [&](std::uint32_t, const std::string& cause) { why.push_back(cause); };
  }
  run_round(0, -1, [] {});  // both ends know of both rails
  EXPECT_EQ(break_rail(0, true), 2 * kWorkers);
  for (int i = 0; i < 50; ++i) turn();
  EXPECT_TRUE(why.empty()) << (why.empty() ? "" : why.front());
  EXPECT_EQ(break_rail(1, true), 2 * kWorkers);
  for (int i = 0; i < 50; ++i) turn();
  EXPECT_EQ(why.size(), kWorkers);
}

}  // namespace
}  // namespace bps::worker::testing
