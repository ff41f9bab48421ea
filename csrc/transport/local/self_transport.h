// A process's way to its own server: both ends live on one loop, so an post is a pointer in a queue and nothing more.
//
// Threading: one thread. Memory: queues keep their capacity, so that steady traffic allocates nothing.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace bps::transport::local {

class SelfTransport final : public Transport {
 public:
  explicit SelfTransport(Counters& counters);
  ~SelfTransport() override;

  // Both ends of one connection; each end is named by the hello and needs its sink set by the caller.
  std::pair<Endpoint*, Endpoint*> connect_pair(const Hello& hello);

  std::string_view name() const override { return "self"; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  std::unique_ptr<Endpoint> connect(std::span<const std::byte>, const Hello&, const Deadline&,
                                    const std::string&) override;
  Endpoint* accept(std::unique_ptr<IncomingConnection>, Sink&) override { return nullptr; }
  Endpoint* attach(std::unique_ptr<Endpoint>) override { return nullptr; }
  void close(Endpoint* endpoint) override;
  int poll() override;
  bool arm() override;
  void disarm() override {}

 private:
  class Half;
  Counters& counters_;
  std::vector<std::unique_ptr<Half>> halves_;
};

}  // namespace bps::transport::local
