// SPDX-License-Identifier: Apache-2.0
#include "van/connection.h"

namespace bps::van {

Connection::Connection(EventLoop& loop, Fd socket, transport::MessageKeys keys, OnMessage on_message,
                       OnClosed on_closed)
    : loop_(loop), state_(std::make_shared<State>(std::move(socket), keys)) {
  state_->on_message_decoded = std::move(on_message);
  state_->on_closed = std::move(on_closed);
  state_->endpoint.start(loop);
}

Connection::~Connection() {
  state_->closed = true;
  state_->endpoint.abandon();
  loop_.post([keep = std::move(state_)] {});  // keeps it alive, as a callback of the endpoint may be what destroys us
}

// Reports a message that is too long. A lost peer is reported by on_closed.
void Connection::check_sent(Status status, std::size_t bytes) {
  if (status != Status::kProtocol) return;
  state_->endpoint.abandon();
  loop_.post([state = state_, bytes] {
    state->on_lost(state->endpoint, "a message of " + std::to_string(bytes) + " bytes is too long for the van");
  });
}

void Connection::State::on_lost(transport::Endpoint&, const std::string& why) {
  if (!std::exchange(closed, true)) on_closed(why);
}

void Connection::State::on_message(transport::ControlEndpoint&, std::span<const std::byte> bytes) {
  if (closed) return;
  heard = Clock::now();
  if (auto message = decode(bytes)) return on_message_decoded(std::move(*message));
  endpoint.abandon();
  on_lost(endpoint, "sent a malformed message");
}

}  // namespace bps::van
