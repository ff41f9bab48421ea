// SPDX-License-Identifier: Apache-2.0
#include "worker/server_paths.h"

#include <algorithm>
#include <utility>

namespace bps::worker {
namespace {

std::vector<std::uint32_t> received_by(const ServerPath& path) {
  std::vector<std::uint32_t> received;
  for (const transport::DataEndpoint* endpoint : path.data) received.push_back(endpoint->received);
  return received;
}

bool is_usable(const ServerPath& path) {
  return !path.control->is_lost() &&
         std::ranges::any_of(path.data, [](const auto* endpoint) { return !endpoint->is_lost(); });
}

bool is_silent(const ServerPath& path) {
  return path.control->is_silent() ||
         std::ranges::any_of(path.data, [](const auto* endpoint) { return endpoint->is_silent(); });
}

}  // namespace

void ServerPaths::add(ServerPath path) {
  fails_over_ |= path.id != 0;
  control_.add(path.control);
  for (transport::DataEndpoint* endpoint : path.data) streams_.push_back({endpoint, 0});
  told_.emplace_back(path.data.size());
  paths_.push_back(std::move(path));
  is_direct_ = streams_.front().endpoint->direct() != nullptr;
  share();
}

void ServerPaths::share() {
  std::vector<std::uint32_t> speeds;
  for (const ServerStream& stream : streams_) speeds.push_back(stream.endpoint->rails.speed);
  shares_ = RailShares(speeds);
}

void ServerPaths::follow_rates() {
  for (std::size_t i = 0; i < streams_.size(); ++i) shares_.note(i, streams_[i].endpoint->measured_rate());
  shares_.follow();
}

const ServerPath* ServerPaths::find(std::uint16_t id) const {
  const auto found = std::ranges::find(paths_, id, &ServerPath::id);
  return found == paths_.end() ? nullptr : &*found;
}

bool ServerPaths::has_other_than(std::uint16_t id) const {
  return std::ranges::any_of(paths_, [&](const ServerPath& path) { return path.id != id && is_usable(path); });
}

std::vector<std::uint16_t> ServerPaths::silent() const {
  std::vector<std::uint16_t> found;
  if (paths_.size() < 2) return found;
  bool others = false;
  for (const ServerPath& path : paths_) {
    if (is_silent(path)) {
      found.push_back(path.id);
    } else {
      others |= is_usable(path);
    }
  }
  if (!others) found.clear();
  return found;
}

std::optional<std::vector<std::uint32_t>> ServerPaths::close(std::uint16_t id, const std::string& why) {
  const auto found = std::ranges::find(paths_, id, &ServerPath::id);
  if (found == paths_.end()) return std::nullopt;
  for (transport::DataEndpoint* endpoint : found->data) {
    endpoint->abandon();
    std::erase_if(streams_, [&](const ServerStream& stream) { return stream.endpoint == endpoint; });
  }
  found->control->abandon();
  control_.remove(found->control);
  auto received = received_by(*found);
  found->why_lost = why;
  told_.erase(told_.begin() + (found - paths_.begin()));
  settling_.push_back(std::move(*found));
  paths_.erase(found);
  share();
  return received;
}

bool ServerPaths::is_settling(std::uint16_t id) const {
  return std::ranges::find(settling_, id, &ServerPath::id) != settling_.end();
}

std::optional<ServerPath> ServerPaths::settle(std::uint16_t id) {
  const auto found = std::ranges::find(settling_, id, &ServerPath::id);
  if (found == settling_.end()) return std::nullopt;
  ServerPath path = std::move(*found);
  settling_.erase(found);
  return path;
}

void ServerPaths::abandon() {
  for (const ServerPath& path : paths_) {
    for (transport::DataEndpoint* endpoint : path.data) endpoint->abandon();
    path.control->abandon();
  }
}

std::vector<tensor::Received> ServerPaths::receipts() {
  std::vector<tensor::Received> receipts;
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    auto received = received_by(paths_[i]);
    if (received == told_[i]) continue;
    told_[i] = received;
    receipts.push_back({paths_[i].id, std::move(received)});
  }
  return receipts;
}

std::vector<SentPush> PushesBySlot::sent_by(std::uint16_t path) const {
  std::vector<SentPush> found;
  for (const Push& one : pushes_) {
    if (one.under_way && one.path == path) found.push_back(one.push);
  }
  return found;
}

void PushesBySlot::repeat_undelivered(const tensor::PathLost& lost) {
  for (Push& one : pushes_) {
    if (!one.under_way || one.path != lost.path) continue;
    const std::uint32_t received = one.stream < lost.received.size() ? lost.received[one.stream] : 0;
    if (static_cast<std::int32_t>(one.number - received) < 0) continue;
    one.under_way = false;
    repeats.push_back(one.push);
  }
}

}  // namespace bps::worker
