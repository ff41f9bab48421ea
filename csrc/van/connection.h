// SPDX-License-Identifier: Apache-2.0
// Carries a stream of van messages between a node and the scheduler. Both ends use it.
//
// Threading: a connection belongs to the thread of its loop, and the loop must outlive it. It may be destroyed at any
// time, also by its own callbacks; none is called after that. Errors: a socket that closes, and a peer that sends a
// malformed message, are reported once through on_closed.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/event_loop.h"
#include "core/fd.h"
#include "transport/socket_control.h"
#include "van/messages.h"

namespace bps::van {

class Connection {
 public:
  using OnMessage = std::function<void(Message&&)>;
  using OnClosed = std::function<void(const std::string& why)>;

  Connection(EventLoop& loop, Fd socket, transport::MessageKeys keys, OnMessage on_message, OnClosed on_closed);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Sends the message now, or as soon as the socket takes it. The loop reports a failure through on_closed.
  void send(const Message& message) { send_encoded(encode(message)); }
  void send_encoded(const Bytes& message) { check_sent(state_->endpoint.send(message), message.size()); }
  // Does the same with a message that many peers get.
  void send_shared(const std::shared_ptr<const transport::SharedMessage>& message) {
    check_sent(state_->endpoint.send(message), message->size());
  }
  // Returns when the last message of the peer came.
  Clock::time_point heard() const { return state_->heard; }
  void forgive_silence() { state_->heard = Clock::now(); }

 private:
  void check_sent(Status status, std::size_t bytes);

  // The state outlives the connection while one of its callbacks runs.
  struct State final : transport::ControlSink {
    State(Fd socket, transport::MessageKeys keys) : endpoint(std::move(socket), keys, {}, counters, kMostMessageBytes) {
      endpoint.sink = this;
    }
    void on_message(transport::ControlEndpoint& from, std::span<const std::byte> bytes) override;
    void on_lost(transport::Endpoint& peer, const std::string& why) override;

    Counters counters;
    transport::SocketControl endpoint;
    OnMessage on_message_decoded;
    OnClosed on_closed;
    Clock::time_point heard = Clock::now();
    bool closed = false;
  };

  EventLoop& loop_;
  std::shared_ptr<State> state_;
};

}  // namespace bps::van
