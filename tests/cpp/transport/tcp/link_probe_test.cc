// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/link_probe.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "core/error.h"
#include "transport/listener.h"
#include "transport/tcp/tcp_rails.h"

namespace bps::transport::tcp {
namespace {

const Credentials kOurs = Credentials::from("job", "secret");

// A listener whose connections are those of measurements.
class Server {
 public:
  Server() {
    loop_.call([this] {
      Fd socket = Listener::listen_tcp("127.0.0.1", 0);
      const TcpAddress address{"127.0.0.1", Listener::port_of(socket.get()), 0};
      const std::string text = to_text({&address, 1});
      published_.assign(as_bytes(text).begin(), as_bytes(text).end());
      listener_ = std::make_unique<Listener>(loop_.loop(), std::move(socket), kOurs, [this](AuthenticatedSocket&& one) {
        EXPECT_EQ(one.hello.plane, Plane::kProbe);
        if (takes) sink_.take(std::move(one));
      });
    });
  }
  ~Server() {
    loop_.call([this] {
      listener_.reset();
      sink_.close();
    });
  }
  ConnectRequest request(double patience_s = 10) const {
    return {.address = published_, .hello = {.node = 7}, .deadline = Deadline::after(patience_s), .whom = "server 0"};
  }

  bool takes = true;

 private:
  ListenerLoop loop_;
  Bytes published_;
  std::unique_ptr<Listener> listener_;
  ProbeSink sink_{loop_.loop()};
};

TEST(LinkProbe, MeasuresSeveralTimesAndAtOnce) {
  const Server server;
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&] {
      for (int round = 0; round < 3; ++round) {
        const double rate = measure_link(server.request(), kOurs);
        EXPECT_GT(rate, 1e5);
        EXPECT_LT(rate, 1e12);
      }
    });
  }
  for (auto& client : clients) client.join();
}

TEST(LinkProbe, AServerThatEndsIsAnError) {
  Server server;
  server.takes = false;
  try {
    (void)measure_link(server.request(), kOurs);
    FAIL() << "nobody took the bytes";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnreachable);
    EXPECT_NE(std::string(error.what()).find("server 0"), std::string::npos);
  }
}

TEST(LinkProbe, StrangersMeasureNothing) {
  const Server server;
  EXPECT_THROW((void)measure_link(server.request(), Credentials::from("job", "other")), HandshakeError);
}

TEST(LinkProbe, AMemberThatStopsInTheMiddleHoldsNobodyUp) {
  const Server server;
  const auto rails = parse_addresses(as_text(server.request().address));
  ASSERT_TRUE(rails);
  const Fd stopped = connect_tcp("127.0.0.1", rails->front().port, Deadline::after(10));
  (void)client_handshake(stopped.get(), {.node = 8, .plane = Plane::kProbe}, kOurs, Deadline::after(10), "server 0");
  ASSERT_EQ(::send(stopped.get(), "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_GT(measure_link(server.request(), kOurs), 1e5);
}

}  // namespace
}  // namespace bps::transport::tcp
