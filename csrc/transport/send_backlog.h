// SPDX-License-Identifier: Apache-2.0
// Keeps what a stream has still to send: its own bytes, and between them messages that other streams send, too. Belongs
// to the thread of the stream.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <span>

#include "core/bytes.h"
#include "transport/message_mac.h"

namespace bps::transport {

// Holds a message that goes to many peers. It is kept, and hashed, once.
class SharedMessage {
 public:
  explicit SharedMessage(std::span<const std::byte> message);
  std::span<const std::byte> length_and_bytes() const { return bytes_; }
  std::size_t size() const { return bytes_.size() - sizeof(std::uint32_t); }
  MessageMac sign(MessageSigner& signer) const { return digest_ ? signer.sign(*digest_) : signer.sign(bytes_); }

 private:
  Bytes bytes_;
  std::optional<Digest> digest_;
};

class SendBacklog {
 public:
  bool is_empty() const { return begin_ == own_.size() && shared_.empty(); }
  std::size_t size() const { return own_.size() - begin_ + shared_bytes_; }
  void add(std::span<const std::byte> bytes) { own_.insert(own_.end(), bytes.begin(), bytes.end()); }
  void add(const std::shared_ptr<const SharedMessage>& message);
  // Returns the last bytes of its own that were added.
  std::span<const std::byte> last(std::size_t size) const { return std::span(own_).last(size); }
  // Returns the bytes that go out next. note_sent() tells how many of them are out.
  std::span<const std::byte> next() const;
  void note_sent(std::size_t bytes);

 private:
  // Holds a shared message, which goes out when `at` bytes of own_ are out.
  struct Shared {
    std::size_t at;
    std::shared_ptr<const SharedMessage> message;
    std::size_t begin = 0;
  };

  Bytes own_;
  std::size_t begin_ = 0;
  std::deque<Shared> shared_;
  std::size_t shared_bytes_ = 0;
};

}  // namespace bps::transport
