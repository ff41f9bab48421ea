#include "transport/reactor.h"

#include <algorithm>

#include "core/log.h"

namespace bps {
namespace {

constexpr Duration kLongestSleep = std::chrono::milliseconds(250);
constexpr Duration kBlockedSleep = std::chrono::milliseconds(1);
constexpr int kRoundsPerLook = 4;  // of polled work, before descriptors are looked at again

}  // namespace

Reactor::Reactor(std::string name, int spin_limit_us)
    : name_(std::move(name)), spin_limit_(std::chrono::microseconds(spin_limit_us)) {}

Reactor::~Reactor() {
  stop();
}

Transport* Reactor::transport(std::string_view name) const {
  for (const auto& transport : transports_) {
    if (transport->name() == name) return transport.get();
  }
  return nullptr;
}

void Reactor::start() {
  thread_ = std::thread([this] {
    name_thread(name_);
    run();
  });
}

void Reactor::stop() {
  stop_ = true;
  loop_.wake();
  if (thread_.joinable()) thread_.join();
}

bool Reactor::work() {
  bool found = false;
  for (const auto& transport : transports_) found |= transport->poll() > 0;
  for (std::size_t i = 0; i < actors_.size(); ++i) found |= actors_[i]->step();
  return found;
}

// Descriptors are looked at by a system call, so that what can be polled is polled first, and a sleep is the look.
void Reactor::run() {
  const bool may_spin = spin_limit_ > Duration::zero();
  Clock::time_point last_work{};
  for (int rounds = 1; !stop_.load(std::memory_order_relaxed); ++rounds) {
    if (work()) {
      if (rounds % kRoundsPerLook == 0) loop_.turn(Duration::zero());
      if (may_spin) last_work = Clock::now();
      continue;
    }
    if (spin_ > Duration::zero()) {
      const bool found = loop_.turn(Duration::zero()) > 0;
      const auto now = Clock::now();
      if (found) last_work = now;
      if (now - last_work < spin_) continue;
    }
    sleep();
    if (!may_spin) continue;
    // Learn: a mean gap that fits the limit is worth spinning for, a longer one is not worth spinning at all.
    const auto now = Clock::now();
    const Duration gap = now - last_work;
    mean_gap_ = (mean_gap_ * 7 + std::min<Duration>(gap, std::chrono::milliseconds(1))) / 8;
    spin_ = mean_gap_ * 2 <= spin_limit_ ? mean_gap_ * 2 : Duration::zero();
    last_work = now;
  }
}

void Reactor::sleep() {
  bool ready = true;
  bool blocked = false;
  std::size_t armed_transports = 0;
  std::size_t armed_actors = 0;
  while (ready && armed_transports < transports_.size()) ready = transports_[armed_transports++]->arm();
  while (ready && armed_actors < actors_.size()) {
    blocked |= actors_[armed_actors]->blocked();
    ready = actors_[armed_actors++]->arm();
  }
  // Also who finds work at the last moment looks at the descriptors: that work may be held up until one of them is.
  loop_.turn(!ready ? Duration::zero() : blocked ? kBlockedSleep : kLongestSleep);
  if (ready) counters_.wakeups.add();
  for (std::size_t i = 0; i < armed_transports; ++i) transports_[i]->disarm();
  for (std::size_t i = 0; i < armed_actors; ++i) actors_[i]->disarm();
}

}  // namespace bps
