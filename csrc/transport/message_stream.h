// SPDX-License-Identifier: Apache-2.0
// Short messages over a stream socket, without blocking: a 32-bit length, then the bytes.
//
// Threading: belongs to the thread of its loop. Errors: a closed socket, or a length beyond the limit, is reported once
// through on_closed; after that send() answers kPeerLost.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/bytes.h"
#include "core/error.h"
#include "core/event_loop.h"
#include "core/fd.h"

namespace bps::transport {

class MessageStream {
 public:
  struct Events {
    std::function<void(std::span<const std::byte>)> on_message;
    std::function<void(const std::string& why)> on_closed;
  };

  MessageStream(Fd socket, std::size_t largest_message);
  ~MessageStream();
  MessageStream(const MessageStream&) = delete;
  MessageStream& operator=(const MessageStream&) = delete;

  void start(EventLoop& loop, Events events);
  // Copied; goes out now or as soon as the socket takes it.
  Status send(std::span<const std::byte> message);
  // Closes without on_closed.
  void close();
  // Sends what is queued, waiting up to the deadline: for a last message before close().
  void flush(int timeout_ms);
  int fd() const { return socket_.get(); }

 private:
  void on_ready(std::uint32_t events);
  void receive();
  void transmit();
  void fail(const std::string& why);

  Fd socket_;
  const std::size_t largest_;
  EventLoop* loop_ = nullptr;
  Events events_;
  Bytes in_;
  std::size_t in_size_ = 0;
  Bytes out_;
  std::size_t out_begin_ = 0;
  bool want_write_ = false;
};

}  // namespace bps::transport
