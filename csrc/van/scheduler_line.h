// SPDX-License-Identifier: Apache-2.0
// Keeps the connection of a node to the scheduler, and the next one when that is lost. Belongs to the van's thread; any
// thread may call heard().
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/clock.h"
#include "van/connection.h"
#include "van/find_scheduler.h"

namespace bps::van {

class SchedulerLine {
 public:
  SchedulerLine(EventLoop& loop, Connection::OnMessage on_message, Connection::OnClosed on_closed)
      : loop_(loop), on_message_(std::move(on_message)), on_closed_(std::move(on_closed)) {}

  void connect(FoundScheduler&& scheduler) {
    where_ = scheduler.where;
    ++number_;
    open_.emplace(
        loop_, std::move(scheduler.socket), transport::MessageKeys::of_client(scheduler.session.key),
        [this](Message&& message) {
          heard_ns_ = Clock::now().time_since_epoch().count();
          on_message_(std::move(message));
        },
        on_closed_);
  }
  void close() { open_.reset(); }
  bool is_open() const { return open_.has_value(); }
  // Returns the number of the last connection. The first one has 1.
  std::uint64_t number() const { return number_; }
  const std::string& where() const { return where_; }
  // Has no effect while there is no connection.
  void send(const Message& message) {
    if (open_) open_->send(message);
  }
  void send_encoded(const Bytes& message) {
    if (open_) open_->send_encoded(message);
  }
  // Returns how long the scheduler has said nothing. There must be a connection.
  Duration silence() const { return Clock::now() - open_->heard(); }
  void forgive_silence() { open_->forgive_silence(); }
  // Returns when the scheduler was heard last, by any connection.
  Clock::time_point heard() const { return Clock::time_point(Duration(heard_ns_)); }

 private:
  EventLoop& loop_;
  const Connection::OnMessage on_message_;
  const Connection::OnClosed on_closed_;
  std::optional<Connection> open_;
  std::uint64_t number_ = 0;
  std::string where_;
  std::atomic<Duration::rep> heard_ns_{0};
};

}  // namespace bps::van
