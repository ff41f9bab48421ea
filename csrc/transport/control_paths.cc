// SPDX-License-Identifier: Apache-2.0
#include "transport/control_paths.h"

#include <algorithm>
#include <utility>

#include "core/codec.h"

namespace bps::transport {
namespace {

constexpr std::size_t kHeadSize = codec::kSize<ControlPaths::Head>;

}  // namespace

void ControlPaths::add(ControlEndpoint* endpoint) {
  numbered_ |= endpoint->hello.path != 0;
  endpoints_.push_back(endpoint);
}

void ControlPaths::remove(ControlEndpoint* endpoint) {
  const auto found = std::ranges::find(endpoints_, endpoint);
  if (found == endpoints_.end()) return;
  const bool in_use = found == endpoints_.begin();
  endpoints_.erase(found);
  if (!in_use || endpoints_.empty()) return;
  for (const Sent& one : sent_) (void)transmit(one.number, one.message);
}

Status ControlPaths::send(Bytes message) {
  if (endpoints_.empty()) return Status::kPeerLost;
  if (!numbered_) return endpoints_.front()->send(message);
  if (message.size() + kHeadSize > kMaxMessage) return Status::kProtocol;
  const Sent& kept = sent_.emplace_back(Sent{++last_sent_, std::move(message)});
  return transmit(kept.number, kept.message);
}

Status ControlPaths::transmit(std::uint64_t number, std::span<const std::byte> message) {
  const auto head = codec::encode(Head{number, received_});
  confirmed_ = received_;
  Bytes bytes;
  bytes.reserve(head.size() + message.size());
  bytes.insert(bytes.end(), head.begin(), head.end());
  bytes.insert(bytes.end(), message.begin(), message.end());
  return endpoints_.front()->send(bytes);
}

std::optional<std::span<const std::byte>> ControlPaths::receive(std::span<const std::byte> message) {
  if (!numbered_) return message;
  const auto head = codec::decode_front<Head>(message);
  if (!head) return std::nullopt;
  while (!sent_.empty() && sent_.front().number <= head->received) sent_.pop_front();
  if (head->number != received_ + 1) return std::nullopt;
  ++received_;
  if (received_ - confirmed_ >= kConfirmEvery && !endpoints_.empty()) (void)transmit(0, {});
  return message.subspan(kHeadSize);
}

}  // namespace bps::transport
