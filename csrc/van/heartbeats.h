// SPDX-License-Identifier: Apache-2.0
// The heartbeats of a node, which prove that its loops make progress: while one of them is stuck none is sent, and the
// scheduler counts the node as lost in the end. Threading: that of the loop.
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
    // Names a loop that has made no progress since the call that answered "" last, `silence` ago. May be null.
    std::function<std::string(Duration silence)> find_stuck;
    std::function<bool()> can_send;
    std::function<void()> send;
    // A heartbeat is due; answer with send(). A process that `was_stopped` itself (by a debugger, by a closed lid)
    // cannot tell who was silent meanwhile.
    std::function<void(bool was_stopped)> on_due;
  };

  // `silence`: after which the scheduler counts this node as lost.
  Heartbeats(EventLoop& loop, double interval_s, Duration silence, Events events);
  // Sends one now, or as soon as nothing is stuck.
  void send();

 private:
  void beat();

  EventLoop& loop_;
  const double interval_s_;
  const Duration silence_;
  const Events events_;
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point last_proof_ = last_beat_;
  bool has_warned_ = false;  // of the heartbeats that are held back now
  Timer next_beat_;
  Timer next_try_;  // to send a heartbeat that is held back
};

}  // namespace bps::van
