// SPDX-License-Identifier: Apache-2.0
// Carries short messages over a stream socket, without blocking: a 32-bit length, the bytes, and an authentication code
// (message_mac.h). A stream without keys has no codes: on one host the kernel vouches for the peer.
//
// A stream belongs to the thread of its loop. A closed socket, a length beyond the limit or a wrong code is reported
// once through on_closed, and so is a peer that leaves tens of megabytes unread. After that send() returns kPeerLost. A
// peer that sends without end has its budget (core/turn_budget.h) in each turn of the loop.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/bytes.h"
#include "core/error.h"
#include "core/event_loop.h"
#include "core/fd.h"
#include "core/turn_budget.h"
#include "transport/message_mac.h"
#include "transport/send_backlog.h"

namespace bps::transport {

class MessageStream {
 public:
  struct Events {
    std::function<void(std::span<const std::byte>)> on_message;
    std::function<void(const std::string& why)> on_closed;
  };

  MessageStream(Fd socket, std::optional<MessageKeys> keys, std::size_t largest_message);
  ~MessageStream();
  MessageStream(const MessageStream&) = delete;
  MessageStream& operator=(const MessageStream&) = delete;

  void start(EventLoop& loop, Events events);
  // Copies the message. It goes out now or as soon as the socket takes it.
  Status send(std::span<const std::byte> message);
  // Does the same without a copy.
  Status send(const std::shared_ptr<const SharedMessage>& message);
  // Closes the stream without calling on_closed.
  void close();
  // Returns true when the peer's system has all that was sent.
  bool is_flushed() const;
  int fd() const { return socket_.get(); }
  // Returns true when the stream was closed because a message with a wrong code came.
  bool was_forged() const { return was_forged_; }

 private:
  void on_ready(std::uint32_t events);
  void receive();
  bool take_messages(TurnBudget& budget);
  void defer();
  void transmit();
  Status check(std::size_t size);
  std::size_t mac_size() const { return keys_ ? sizeof(MessageMac) : 0; }
  bool is_authentic(std::span<const std::byte> length_and_bytes, std::span<const std::byte> mac);
  void fail(const std::string& why);

  Fd socket_;
  std::optional<MessageKeys> keys_;
  const std::size_t largest_;
  EventLoop* loop_ = nullptr;
  Events events_;
  Bytes in_;
  std::size_t in_size_ = 0;
  SendBacklog out_;
  bool does_not_read_ = false;
  bool want_write_ = false;
  bool was_forged_ = false;
  bool is_deferred_ = false;  // the peer has used up its budget of this turn
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace bps::transport
