// SPDX-License-Identifier: Apache-2.0
// Keeps the scheduler's connections to processes that know the job's secret, members and others. It tells them that the
// scheduler lives, and finds out which of them are silent. Belongs to the scheduler's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "van/connection.h"
#include "van/job.h"

namespace bps::van {

class Peers {
 public:
  struct Events {
    std::function<void(Peer, Message&&)> on_message;
    std::function<void(Peer, const std::string& why)> on_closed;  // to be answered with close()
  };

  // `timeout_s` is the silence after which a member counts as lost.
  Peers(EventLoop& loop, double timeout_s, Events events)
      : loop_(loop), timeout_s_(timeout_s), events_(std::move(events)) {}

  // `key` is the connection's, from the handshake.
  void add(Fd socket, const Digest& key);
  void close(Peer peer) { connections_.erase(peer); }
  void close_all() { connections_.clear(); }
  std::size_t size() const { return connections_.size(); }
  // Has no effect on a peer that is gone.
  void send(Peer peer, const Message& message);
  void send(std::span<const Peer> peers, const Message& message);

  // Return the seconds between two calls of beat(), and of find_silent().
  double beat_s() const;
  double look_s() const { return timeout_s_ / 4; }
  // Sends heartbeats to the members, if they are due.
  void beat(const Job& job);
  Clock::time_point last_beat() const { return last_beat_; }  // the last call of beat(), even if it sent nothing
  // Lists the members that are silent, and other processes whose time to join is over, with a text for people.
  std::vector<std::pair<Peer, std::string>> find_silent(const Job& job);
  // Returns for how long nothing was heard of this peer; 0 if it is gone.
  std::int64_t silence_ms(Peer peer) const;
  // These tell how many members there were at the last find_silent(), and for how long the most silent one had said
  // nothing.
  std::uint64_t members() const { return members_; }
  std::uint64_t longest_silence_ms() const { return static_cast<std::uint64_t>(longest_s_ * 1e3); }

 private:
  EventLoop& loop_;
  const double timeout_s_;
  const Events events_;
  std::unordered_map<Peer, std::unique_ptr<Connection>> connections_;
  Peer last_ = 0;
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point last_told_{};  // when heartbeats were sent
  Clock::time_point last_look_ = Clock::now();
  std::uint64_t members_ = 0;
  double longest_s_ = 0;
};

}  // namespace bps::van
