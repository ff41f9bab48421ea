// Processes anywhere: control messages over one connection, data over others.
//
// A data endpoint is one TCP connection. A write is a frame: 32 bytes that name the region, then the bytes, which go
// straight from the source into the peer's region. The receiver checks every frame against the regions it registered;
// keys are random, so a region that was withdrawn is never mistaken for another.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/event_loop.h"
#include "transport/transport.h"

namespace bps::transport::tcp {

class TcpTransport final : public Transport {
 public:
  // `congestion`: congestion control of each data socket; empty for the system's default.
  TcpTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, std::string congestion);
  ~TcpTransport() override;

  std::string_view name() const override { return "tcp"; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  // `address`: "host port".
  std::unique_ptr<Endpoint> connect(std::span<const std::byte> address, const Hello& hello, const Deadline& deadline,
                                    const std::string& whom) override;
  Endpoint* accept(std::unique_ptr<IncomingConnection> incoming, Sink& sink) override;
  Endpoint* attach(std::unique_ptr<Endpoint> endpoint) override;
  void close(Endpoint* endpoint) override;
  int poll() override;
  bool arm() override;
  void disarm() override {}
  bool relies_on_descriptors() const override { return !endpoints_.empty(); }

  static std::string make_address(const std::string& host, std::uint16_t port);

  using Regions = std::unordered_map<std::uint64_t, std::span<std::byte>>;

 private:
  EventLoop& loop_;
  const Credentials& credentials_;
  Counters& counters_;
  const std::string congestion_;
  std::shared_ptr<Regions> regions_;  // by key; shared with the regions, which remove themselves
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
};

}  // namespace bps::transport::tcp
