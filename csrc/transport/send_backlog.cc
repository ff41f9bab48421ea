// SPDX-License-Identifier: Apache-2.0
#include "transport/send_backlog.h"

#include <cstring>

namespace bps::transport {

SharedMessage::SharedMessage(std::span<const std::byte> message) {
  const auto length = static_cast<std::uint32_t>(message.size());
  bytes_.resize(sizeof length + message.size());
  std::memcpy(bytes_.data(), &length, sizeof length);
  copy_bytes(message, bytes_.data() + sizeof length);
  if (bytes_.size() > kSignedWhole) digest_ = sha256(bytes_);
}

void SendBacklog::add(const std::shared_ptr<const SharedMessage>& message) {
  shared_.push_back({own_.size(), message});
  shared_bytes_ += message->size();
}

std::span<const std::byte> SendBacklog::next() const {
  if (shared_.empty()) return std::span(own_).subspan(begin_);
  const Shared& first = shared_.front();
  if (first.at > begin_) return std::span(own_).subspan(begin_, first.at - begin_);
  return first.message->length_and_bytes().subspan(first.begin);
}

void SendBacklog::note_sent(std::size_t bytes) {
  if (shared_.empty() || shared_.front().at > begin_) {
    begin_ += bytes;
  } else {
    Shared& first = shared_.front();
    first.begin += bytes;
    if (first.begin < first.message->length_and_bytes().size()) return;
    shared_bytes_ -= first.message->size();
    shared_.pop_front();
  }
  if (is_empty()) {
    own_.clear();
    begin_ = 0;
  }
}

}  // namespace bps::transport
