#include "van/connection.h"

namespace bps::van {

Connection::Connection(EventLoop& loop, Fd socket, OnMessage on_message, OnClosed on_closed)
    : loop_(loop), state_(std::make_shared<State>(std::move(socket))) {
  state_->on_message = std::move(on_message);
  state_->on_closed = std::move(on_closed);
  State* const state = state_.get();  // the stream is a part of it
  state->stream.start(loop, {.on_message = [state](std::span<const std::byte> bytes) { state->receive(bytes); },
                             .on_closed = [state](const std::string& why) { state->fail(why); }});
}

Connection::~Connection() {
  state_->closed = true;
  state_->stream.close();
  loop_.post([keep = std::move(state_)] {});  // a callback of the stream may be what destroys us
}

void Connection::send_encoded(const Bytes& message) {
  if (state_->stream.send(message) != Status::kProtocol) return;  // a lost peer is reported by on_closed
  state_->stream.close();
  loop_.post([state = state_, size = message.size()] {
    state->fail("a message of " + std::to_string(size) + " bytes is too long for the van");
  });
}

void Connection::State::fail(const std::string& why) {
  if (!std::exchange(closed, true)) on_closed(why);
}

void Connection::State::receive(std::span<const std::byte> bytes) {
  if (closed) return;
  heard = Clock::now();
  if (auto message = decode(bytes)) return on_message(std::move(*message));
  stream.close();
  fail("sent a malformed message");
}

}  // namespace bps::van
