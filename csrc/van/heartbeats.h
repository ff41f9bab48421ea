// SPDX-License-Identifier: Apache-2.0
// Sends the heartbeats of a node. They prove that its loops make progress: while a loop is stuck no heartbeat is sent,
// and in the end the scheduler counts the node as lost. Belongs to the thread of the event loop.
#pragma once

#include <functional>
#include <string>

#include "core/clock.h"
#include "core/event_loop.h"

namespace bps::van {

std::string in_seconds(Duration time);  // "1.5 s"

class Heartbeats {
 public:
  struct Events {
    // Names a loop that has made no progress since this function returned "" last, which was `silence` ago. May be
    // null.
    std::function<std::string(Duration silence)> find_stuck;
    std::function<bool()> can_send;
    std::function<void()> send;
    // Is called when a heartbeat is due, and should call Heartbeats::send(). A process that `was_stopped` itself (by a
    // debugger, by a closed lid) cannot tell who was silent meanwhile.
    std::function<void(bool was_stopped)> on_due;
  };

  // `silence` is the time after which the scheduler counts this node as lost.
  Heartbeats(EventLoop& loop, double interval_s, Duration silence, Events events);
  // Sends a heartbeat now, or as soon as no loop is stuck.
  void send();

 private:
  void beat();

  EventLoop& loop_;
  const double interval_s_;
  const Duration silence_;
  const Events events_;
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point last_proof_ = last_beat_;
  bool has_warned_ = false;  // that heartbeats are held back now
  Timer next_beat_;
  Timer next_try_;  // to send a heartbeat that is held back
};

}  // namespace bps::van
