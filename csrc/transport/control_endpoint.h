// The control plane of tcp and shm: messages over a stream socket, and no way to write payload.
#pragma once

#include "transport/message_stream.h"
#include "transport/transport.h"

namespace bps::transport {

class ControlEndpoint final : public Endpoint {
 public:
  ControlEndpoint(Fd socket, const Hello& made_by, Counters& counters)
      : Endpoint(false, made_by), stream_(std::move(socket), kMaxMessage), counters_(counters) {}

  void start(EventLoop& loop) {
    stream_.start(loop, {[this](std::span<const std::byte> message) { sink->on_message(*this, message); },
                         [this](const std::string& why) { sink->on_lost(*this, why); }});
  }
  std::size_t write(std::span<const WriteOp>) override { return 0; }  // payload never travels on a control endpoint
  Status send(std::span<const std::byte> message) override {
    counters_.control_messages.add();
    counters_.control_bytes.add(message.size());
    return stream_.send(message);
  }
  void abandon() override { stream_.close(); }

 private:
  MessageStream stream_;
  Counters& counters_;
};

}  // namespace bps::transport
