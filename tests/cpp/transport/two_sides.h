// SPDX-License-Identifier: Apache-2.0
// Makes two processes' worth of one transport, in one test: each side has a thread, a loop, and a sink that writes down
// what it is told.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/hmac.h"
#include "eventually.h"
#include "transport/fault/fault.h"
#include "transport/listener.h"
#include "transport/local/self_transport.h"
#include "transport/rdma/rdma.h"
#include "transport/reactor.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace bps::transport::testing {

struct Way {
  // shm, shm-copy (no mapping of plain memory, no cross-memory copies), tcp, rdma, rdma-rails (the same device twice)
  std::string transport;
  bool faulty;

  bool is_rdma() const { return transport.starts_with("rdma"); }
};

inline void PrintTo(const Way& way, std::ostream* out) {
  *out << way.transport << (way.faulty ? ", faulty" : "");
}

inline std::string name_of(const ::testing::TestParamInfo<Way>& info) {
  std::string name = info.param.transport + (info.param.faulty ? "_faulty" : "");
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

// Finds RDMA as the tests use it: the device of BPS_TEST_HCA, or whichever there is. A test that needs it and finds
// none is skipped with the reason, unless BPS_TEST_HCA promised one.
inline const rdma::RdmaRails& test_rdma() {
  static const rdma::RdmaRails rails = [] {
    rdma::RdmaOptions options;
    const char* device = std::getenv("BPS_TEST_HCA");
    if (device != nullptr) options.hca = rdma::HcaFilter::parse(std::string("=") + device);
    rdma::RdmaRails found = rdma::find_rdma(options, {});
    if (device != nullptr && !found.usable()) throw Error(ErrorCode::kTransport, found.why_not, found.hint);
    return found;
  }();
  return rails;
}

class Recorder final : public ControlSink, public DataSink {
 public:
  static constexpr std::uint32_t kForbidden = 0xffff0000;  // the immediate of writes that it does not allow
  struct Posted {
    Bytes header;
    RemoteSpan span;
    DataEndpoint* from;
  };

  std::size_t allows_write(DataEndpoint&, const RemoteSpan&, std::uint32_t immediate) override {
    return immediate == kForbidden ? 0 : unit;
  }
  void on_cut_off(DataEndpoint&, std::uint32_t immediate, std::uint64_t bytes) override {
    note([&] { cut_off[immediate] = bytes; });
  }
  void on_write(DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) override {
    note([&] {
      ++writes[immediate];
      whole[immediate] = [&from, landed](std::uint64_t total) { return from.is_whole(landed, total); };
    });
  }
  void on_posting(DataEndpoint& from, std::span<const std::byte> header, const RemoteSpan& span) override {
    note([&] { postings.push_back({Bytes(header.begin(), header.end()), span, &from}); });
  }
  void on_written(DataEndpoint&, std::uint64_t token) override {
    note([&] { ++written[token]; });
  }
  void on_message(ControlEndpoint&, std::span<const std::byte> message) override {
    note([&] {
      messages.emplace_back(message.begin(), message.end());
      if (turn) ++messages_by_turn[turn()];
    });
    if (message_takes.count() > 0) std::this_thread::sleep_for(message_takes);
  }
  void on_lost(Endpoint&, const std::string&) override {
    note([&] { ++lost; });
  }

  // Waits until `done` holds. Returns false after a generous while.
  bool wait(const std::function<bool(const Recorder&)>& done) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(30), [&] { return done(*this); });
  }
  std::size_t write_count() const {
    std::size_t count = 0;
    for (const auto& [immediate, times] : writes) count += times;
    return count;
  }

  // Looks from the test's thread, while the loop may still write.
  template <typename F>
  auto look(F read) {
    const std::lock_guard lock(mutex);
    return read(*this);
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::size_t unit = 1;                            // the bytes in whose multiples writes may land
  std::map<std::uint32_t, std::uint64_t> cut_off;  // by immediate: the bytes that had landed
  std::map<std::uint32_t, std::size_t> writes;
  std::map<std::uint32_t, std::function<bool(std::uint64_t)>> whole;  // tells whether the last one had so many bytes
  std::map<std::uint64_t, std::size_t> written;
  std::vector<Bytes> messages;
  std::chrono::microseconds message_takes{0};
  std::function<std::uint64_t()> turn;  // returns the turn of the loop
  std::map<std::uint64_t, std::size_t> messages_by_turn;
  std::vector<Posted> postings;
  int lost = 0;

 private:
  template <typename F>
  void note(F change) {
    const std::lock_guard lock(mutex);
    change();
    changed.notify_all();
  }
};

class Side {
 public:
  Side(const Way& way, const Credentials& credentials) : reactor_("test", Spin{}), credentials_(credentials) {
    std::unique_ptr<Transport> made;
    if (way.transport == "tcp") {
      made = std::make_unique<tcp::TcpTransport>(reactor_.loop(), credentials, reactor_.counters(), tcp::TcpOptions{});
    } else if (way.is_rdma()) {
      rails_.assign(way.transport == "rdma" ? 1 : 2, test_rdma().rails.front());
      made = rdma::make_rdma_transport(reactor_.loop(), credentials, reactor_.counters(), rails_, {});
    } else {
      made = std::make_unique<shm::ShmTransport>(reactor_.loop(), credentials, reactor_.counters(),
                                                 shm::ShmOptions{.cross_memory = way.transport != "shm-copy"});
    }
    if (way.faulty) {
      fault::FaultPlan plan;
      plan.refuse = 0.1;
      plan.partial = 0.3;
      plan.hold = 0.5;
      made = std::make_unique<fault::FaultTransport>(std::move(made), plan);
    }
    transport = made.get();
    reactor_.add(std::move(made));
    sink.turn = [this] { return reactor_.turns(); };
    reactor_.start();
  }
  ~Side() {
    reactor_.call([&] {
      listener_.reset();
      rdma_listener_.reset();
    });
    reactor_.stop();
  }

  template <typename F>
  auto call(F task) {
    return reactor_.call(std::move(task));
  }

  // Lets callers in. Returns the address to call.
  Bytes open() {
    return call([&] {
      if (transport->kind() == Kind::kRdma) {
        rdma_listener_ = rdma::open_rdma_listener(
            reactor_.loop(), credentials_, rails_, PortRange{},
            [this](std::unique_ptr<IncomingConnection> incoming) { accept_connection(std::move(incoming)); });
        return rdma_listener_->address();
      }
      std::string address;
      Fd listener;
      if (transport->kind() == Kind::kTcp) {
        listener = Listener::listen_tcp("127.0.0.1", 0);
        address = tcp::to_text({{{"127.0.0.1", Listener::port_of(listener.get()), 0}}});
      } else {
        std::array<std::byte, 8> random;
        random_bytes(random);
        std::uint64_t number = 0;
        std::memcpy(&number, random.data(), sizeof number);
        address = "bps-test-" + std::to_string(number);
        listener = Listener::listen_local(address);
      }
      listener_ = std::make_unique<Listener>(reactor_.loop(), std::move(listener), credentials_,
                                             [this](AuthenticatedSocket&& socket) {
                                               accept_connection(std::make_unique<IncomingSocket>(std::move(socket)));
                                             });
      const auto bytes = as_bytes(address);
      return Bytes(bytes.begin(), bytes.end());
    });
  }

  static ConnectRequest request_for(const Bytes& address, std::size_t connection = 0) {
    return {.address = address,
            .hello = {.node = 7, .client_loop = 1, .server_loop = 2},
            .deadline = Deadline::after(10),
            .whom = "the other side",
            .connection = connection};
  }
  ControlEndpoint* connect_control(const Bytes& address, std::size_t connection = 0) {
    auto made = transport->connect_control(request_for(address, connection));
    return call([&] { return transport->attach(std::move(made), sink); });
  }
  DataEndpoint* connect_data(const Bytes& address, std::size_t connection = 0) {
    auto made = transport->connect_data(request_for(address, connection));
    return call([&] { return transport->attach(std::move(made), sink); });
  }

  Counters& counters() { return reactor_.counters(); }

  Transport* transport = nullptr;
  Recorder sink;
  DataEndpoint* data = nullptr;  // the accepted endpoints
  ControlEndpoint* control = nullptr;

 private:
  void accept_connection(std::unique_ptr<IncomingConnection> incoming) {
    const Plane plane = incoming->hello.plane;
    DataEndpoint* made_data = plane == Plane::kData ? transport->accept_data(std::move(incoming), sink) : nullptr;
    ControlEndpoint* made_control =
        plane == Plane::kControl ? transport->accept_control(std::move(incoming), sink) : nullptr;
    const std::lock_guard lock(sink.mutex);
    if (made_data != nullptr) data = made_data;
    if (made_control != nullptr) control = made_control;
    sink.changed.notify_all();
  }

  Reactor reactor_;
  const Credentials& credentials_;
  std::vector<rdma::Rail> rails_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<rdma::RdmaListener> rdma_listener_;
};

// Makes a caller and a callee, connected on both planes.
class TwoSides : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam().is_rdma() && !test_rdma().usable()) GTEST_SKIP() << test_rdma().why_not;
    callee = std::make_unique<Side>(GetParam(), credentials);
    caller = std::make_unique<Side>(GetParam(), credentials);
    address = callee->open();
    control = caller->connect_control(address);
    data = caller->connect_data(address);
    ASSERT_TRUE(callee->sink.wait([&](const Recorder&) { return callee->data && callee->control; }));
  }

  // Posts all writes, as often as the window wants to be asked, and waits until they have arrived.
  void post_all(Side& from, DataEndpoint* endpoint, std::vector<WriteOp> ops) {
    const std::size_t goal = callee->sink.look([](const Recorder& sink) { return sink.write_count(); }) + ops.size();
    std::size_t posted = 0;
    const auto all_posted = [&] {
      posted += from.call([&] { return endpoint->write(std::span(ops).subspan(posted)); });
      return posted == ops.size();
    };
    ASSERT_TRUE(eventually(all_posted, 30, kAtOnce));
    ASSERT_TRUE(callee->sink.wait([&](const Recorder& sink) { return sink.write_count() >= goal; }));
  }

  void post(Side& from, DataEndpoint* endpoint, const Posting& what) {
    const auto is_posted = [&] { return from.call([&] { return endpoint->direct()->post({&what, 1}); }) > 0; };
    ASSERT_TRUE(eventually(is_posted, 30, kAtOnce));
  }

  // Announces memory by a posting: a peer on the same host can write only into memory that was announced to it.
  void introduce(Side& owner, DataEndpoint* endpoint, const Region& region) {
    if (endpoint->direct() == nullptr) return;
    Side& other = &owner == caller.get() ? *callee : *caller;
    const std::size_t goal = other.sink.look([](const Recorder& sink) { return sink.postings.size(); }) + 1;
    post(owner, endpoint, {.header = {}, .source = &region, .source_offset = 0, .length = 1});
    ASSERT_TRUE(other.sink.wait([&](const Recorder& sink) { return sink.postings.size() >= goal; }));
  }

  const Credentials credentials = Credentials::from("job", "secret");
  std::unique_ptr<Side> callee;
  std::unique_ptr<Side> caller;
  Bytes address;  // the callee's
  ControlEndpoint* control = nullptr;
  DataEndpoint* data = nullptr;
};

}  // namespace bps::transport::testing
