// SPDX-License-Identifier: Apache-2.0
// Implements a control endpoint over a stream socket: the control plane of tcp and shm, and the whole van.
#pragma once

#include <memory>
#include <utility>

#include "core/metrics.h"
#include "transport/control_endpoint.h"
#include "transport/listener.h"
#include "transport/message_stream.h"

namespace bps::transport {

class SocketControl final : public ControlEndpoint {
 public:
  SocketControl(Fd socket, std::optional<MessageKeys> keys, const Hello& opened_by, Counters& counters,
                std::size_t largest_message = kMaxMessage)
      : ControlEndpoint(opened_by), stream_(std::move(socket), keys, largest_message), counters_(counters) {}

  void start(EventLoop& loop) {
    stream_.start(loop, {[this](std::span<const std::byte> message) { sink->on_message(*this, message); },
                         [this](const std::string& why) {
                           if (stream_.was_forged()) counters_.forged.add();
                           lose(why);
                           tell_loss();
                         }});
  }
  Status send(std::span<const std::byte> message) override {
    counters_.control_messages.add();
    counters_.control_bytes.add(message.size());
    return stream_.send(message);
  }
  Status send(const std::shared_ptr<const SharedMessage>& message) {
    counters_.control_messages.add();
    counters_.control_bytes.add(message->size());
    return stream_.send(message);
  }
  bool is_silent() const override { return !is_lost() && is_network_silent(stream_.fd()); }
  bool is_flushed() const override { return is_lost() || stream_.is_flushed(); }

 private:
  void sever() override { stream_.close(); }

  MessageStream stream_;
  Counters& counters_;
};

}  // namespace bps::transport
