// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/self_transfer.h"

#include <algorithm>

#include "transport/rdma/rdma.h"
#include "transport/reactor.h"

namespace bps::transport::rdma {
namespace {

constexpr std::uint64_t kPiece = 1 << 20;
constexpr int kRounds = 100;

// Plays one end of the transfer. It records what it is told, and wakes the test that waits for it. The called end
// echoes messages.
class End final : public ControlSink, public DataSink {
 public:
  End(const char* name, const Credentials& credentials, const Rail& rail, const RdmaOptions& options)
      : reactor(name, Spin{}) {
    auto made = make_rdma_transport(reactor.loop(), credentials, reactor.counters(), {rail}, options);
    transport = made.get();
    reactor.add(std::move(made));
    reactor.start();
  }

  void on_write(DataEndpoint&, std::uint32_t, std::uint64_t) override {
    note([this] { ++writes; });
  }
  void on_posting(DataEndpoint&, std::span<const std::byte>, const RemoteSpan&) override {}
  void on_written(DataEndpoint&, std::uint64_t) override {}
  void on_message(ControlEndpoint& from, std::span<const std::byte> message) override {
    if (echoes) (void)from.send(message);
    note([this] { ++messages; });
  }
  void on_lost(Endpoint&, const std::string& why) override {
    note([&] { lost = why; });
  }

  template <typename F>
  void wait(const Deadline& deadline, F done) {
    std::unique_lock lock(mutex);
    const bool in_time = changed.wait_until(lock, deadline.at(), [&] { return done() || !lost.empty(); });
    if (!lost.empty())
      throw Error(ErrorCode::kTransport, "the transfer broke: " + lost, "see the kernel's log (dmesg)");
    if (!in_time) {
      throw Error(ErrorCode::kTimeout, "the transfer did not end in time",
                  "packets are lost, or never come back: check the MTU and the switch; try another GID");
    }
  }

  Reactor reactor;
  Transport* transport = nullptr;
  bool echoes = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t writes = 0;
  std::uint64_t messages = 0;
  std::string lost;

 private:
  template <typename F>
  void note(F change) {
    const std::lock_guard lock(mutex);
    change();
    changed.notify_all();
  }
};

std::byte pattern(std::uint64_t at) {
  return static_cast<std::byte>(at * 0x9E3779B97F4A7C15U >> 56);
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

SelfTransfer transfer_to_self(const Rail& rail, const RdmaOptions& options, std::uint64_t bytes, double timeout_s) {
  const Deadline deadline = Deadline::after(timeout_s);
  const Credentials credentials = Credentials::from("bps doctor", "to myself");
  Bytes source(bytes), target(bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) source[i] = pattern(i);
  End callee("bps-doctor-a", credentials, rail, options), caller("bps-doctor-b", credentials, rail, options);
  callee.echoes = true;

  std::unique_ptr<RdmaListener> listener;
  const auto accept = [&](std::unique_ptr<IncomingConnection> incoming) {
    if (incoming->hello.plane == Plane::kData) {
      callee.transport->accept_data(std::move(incoming), callee);
    } else {
      callee.transport->accept_control(std::move(incoming), callee);
    }
  };
  const Bytes address = callee.reactor.call([&] {
    listener = open_rdma_listener(callee.reactor.loop(), credentials, {rail}, PortRange{}, accept);
    return listener->address();
  });
  const ConnectRequest request{.address = address, .hello = {.node = 1}, .deadline = deadline, .whom = "this process"};
  auto control_made = caller.transport->connect_control(request);
  auto data_made = caller.transport->connect_data(request);
  // A pair has no structured bindings here, because clang lets lambdas capture those only from version 16 on.
  const auto ends = caller.reactor.call([&] {
    return std::pair(caller.transport->attach(std::move(control_made), caller),
                     caller.transport->attach(std::move(data_made), caller));
  });
  auto from = caller.reactor.call([&] { return caller.transport->register_memory(source); });
  auto to = callee.reactor.call([&] { return callee.transport->register_memory(target); });

  SelfTransfer result;
  auto begin = Clock::now();
  for (int i = 1; i <= kRounds; ++i) {
    caller.reactor.call([&] { (void)ends.first->send(std::span(source).first(8)); });
    caller.wait(deadline, [&] { return caller.messages == static_cast<std::uint64_t>(i); });
  }
  result.round_trip_us = seconds_since(begin) / kRounds * 1e6;

  begin = Clock::now();
  std::uint64_t posted = 0;
  for (std::uint64_t at = 0; at < bytes && !deadline.passed();) {
    const std::uint64_t length = std::min(kPiece, bytes - at);
    const WriteOp op{.source = from.get(), .source_offset = at, .length = length, .target = to->remote(at, length)};
    if (caller.reactor.call([&] { return ends.second->write({&op, 1}); }) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      continue;
    }
    at += length;
    ++posted;
  }
  callee.wait(deadline, [&] { return callee.writes == posted; });
  result.bytes = bytes;
  result.gigabytes_per_second = static_cast<double>(bytes) / seconds_since(begin) / 1e9;
  const bool same = source == target;

  caller.reactor.call([&] { from.reset(); });
  callee.reactor.call([&] {
    to.reset();
    listener.reset();
  });
  caller.reactor.stop();
  callee.reactor.stop();
  if (!same) {
    throw Error(ErrorCode::kTransport, "the bytes that arrived are not those that were sent",
                "do not use this device: its driver, firmware or memory is faulty");
  }
  return result;
}

}  // namespace bps::transport::rdma
