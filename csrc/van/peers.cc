// SPDX-License-Identifier: Apache-2.0
#include "van/peers.h"

#include <algorithm>
#include <chrono>

namespace bps::van {
namespace {

// A connection that has not asked to join, or was refused, stays open this long: the reason must have time to arrive.
constexpr auto kLinger = std::chrono::seconds(2);
constexpr double kBeatSeconds = 0.5;  // as often as members send theirs, or more often where the time-out is short
constexpr double kBeatsPerTimeout = 12;

}  // namespace

void Peers::add(Fd socket, const Digest& key) {
  const Peer peer = ++last_;
  connections_[peer] = std::make_unique<Connection>(
      loop_, std::move(socket), transport::MessageKeys::of_server(key),
      [this, peer](Message&& message) { events_.on_message(peer, std::move(message)); },
      [this, peer](const std::string& why) { events_.on_closed(peer, why); });
}

void Peers::send(Peer peer, const Message& message) {
  if (const auto found = connections_.find(peer); found != connections_.end()) found->second->send(message);
}

void Peers::send(std::span<const Peer> peers, const Message& message) {
  if (peers.empty()) return;
  const auto shared = std::make_shared<const transport::SharedMessage>(encode(message));
  for (const Peer peer : peers) {
    if (const auto found = connections_.find(peer); found != connections_.end()) found->second->send_shared(shared);
  }
}

// Returns a time far below that of a look: members count from the last heartbeat, not from when this process stopped.
double Peers::beat_s() const {
  return std::min(kBeatSeconds, timeout_s_ / kBeatsPerTimeout);
}

void Peers::beat(const Job& job) {
  last_beat_ = Clock::now();
  const std::chrono::milliseconds spread{connections_.size() * 1000 / Job::kBeatsPerSecond};
  if (last_beat_ - last_told_ < std::min(spread, std::chrono::milliseconds(job.beat_ms()))) return;
  last_told_ = last_beat_;
  const auto heartbeat = std::make_shared<const transport::SharedMessage>(encode(Heartbeat{}));
  for (const auto& [peer, connection] : connections_) {
    if (!job.knows(peer)) continue;
    // Members need not send heartbeats before all have joined, however long that takes.
    if (job.waits(peer)) connection->forgive_silence();
    connection->send_shared(heartbeat);
  }
}

std::vector<std::pair<Peer, std::string>> Peers::find_silent(const Job& job) {
  const auto now = Clock::now();
  const std::chrono::duration<double> since_last = now - std::exchange(last_look_, now);
  // A process that was stopped itself (by a debugger, by a closed lid) cannot tell who was silent meanwhile.
  const bool was_stopped = since_last.count() > timeout_s_ / 2;
  const bool was_late = since_last.count() > 1.5 * look_s();
  std::vector<std::pair<Peer, std::string>> silent;
  members_ = 0;
  longest_s_ = 0;
  std::size_t heard = 0;  // members that have sent a heartbeat when it was due
  for (const auto& [peer, connection] : connections_) {
    const bool is_known = job.knows(peer);
    if (is_known ? was_stopped || job.waits(peer) : was_late) connection->forgive_silence();
    const std::chrono::duration<double> silence = now - connection->heard();
    if (is_known) {
      ++members_;
      longest_s_ = std::max(longest_s_, silence.count());
      if (silence.count() < timeout_s_ / 2) ++heard;
    }
    if (is_known ? silence.count() <= timeout_s_ : silence <= kLinger) continue;
    silent.emplace_back(peer, "silent for " + std::to_string(silence.count()).substr(0, 4) + " s");
  }
  // The network may be cut in one direction. The others are then in good health, and hear what is said of them here.
  if (members_ > 1 && heard == 0) {
    for (auto& [peer, why] : silent) why += ", and so are all others: the scheduler's own network may be cut";
  }
  return silent;
}

std::int64_t Peers::silence_ms(Peer peer) const {
  const auto found = connections_.find(peer);
  if (found == connections_.end()) return 0;
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - found->second->heard()).count();
}

}  // namespace bps::van
