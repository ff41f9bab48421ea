// SPDX-License-Identifier: Apache-2.0
#include "van/heartbeats.h"

#include <utility>

#include "core/log.h"

namespace bps::van {
namespace {

constexpr double kTriesPerBeat = 8;

}  // namespace

std::string in_seconds(Duration time) {
  const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(time).count() / 100;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

Heartbeats::Heartbeats(EventLoop& loop, double interval_s, Duration silence, Events events)
    : loop_(loop), interval_s_(interval_s), silence_(silence), events_(std::move(events)) {
  next_beat_ = loop.every(interval_s, [this] { beat(); });
}

void Heartbeats::beat() {
  const auto now = Clock::now();
  const auto since_last = now - std::exchange(last_beat_, now);
  events_.on_due(since_last > silence_ / 2);
}

void Heartbeats::send() {
  if (!events_.can_send()) return;
  const auto now = Clock::now();
  const std::string stuck = events_.find_stuck ? events_.find_stuck(now - last_proof_) : "";
  if (stuck.empty()) {
    events_.send();
    last_proof_ = now;
    has_warned_ = false;
    return;
  }
  next_try_ = loop_.after(interval_s_ / kTriesPerBeat, [this] { send(); });
  if (now - last_proof_ < silence_ / 2 || std::exchange(has_warned_, true)) return;
  log_warning(stuck + " has made no progress for " + in_seconds(now - last_proof_) +
              ": the scheduler hears nothing of this process until it does, and counts it as lost after " +
              in_seconds(silence_));
}

}  // namespace bps::van
