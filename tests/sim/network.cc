// SPDX-License-Identifier: Apache-2.0
#include "network.h"

#include <algorithm>

namespace bps::sim {

Machine Network::add(std::function<void()> step) {
  machines_.push_back({.step = std::move(step)});
  return static_cast<Machine>(machines_.size() - 1);
}

void Network::wake_at(Machine machine, Time when) {
  State& state = machines_[machine];
  when = std::max({when, state.paused_until, events.now()});
  if (!state.alive || when >= state.wakes_at) return;
  state.wakes_at = when;
  plan_wake(machine);
}

void Network::plan_wake(Machine machine) {
  const std::uint64_t number = ++machines_[machine].wake;
  events.at(machines_[machine].wakes_at, [this, machine, number] {
    State& state = machines_[machine];
    if (state.wake != number || !state.alive) return;
    state.wakes_at = Time::max();
    state.step();
  });
}

void Network::pause(Machine machine, Time until) {
  State& state = machines_[machine];
  state.paused_until = std::max(state.paused_until, until);
  state.wakes_at = until;
  plan_wake(machine);
}

Time Network::arrival(Machine from, std::uint64_t bytes) {
  State& state = machines_[from];
  state.sends_from = std::max(state.sends_from, events.now()) +
                     Duration(static_cast<std::int64_t>(static_cast<double>(bytes) * 1e9 / conditions.bytes_per_s));
  return state.sends_from + conditions.delay + random.between({}, conditions.jitter);
}

void Network::deliver(Machine from, Machine to, Time when, std::function<void()> arrives,
                      std::function<void()> gives_up) {
  events.at(when, [this, from, to, when, arrives = std::move(arrives), gives_up = std::move(gives_up)]() mutable {
    const auto found = cuts_.find({from, to});
    if (found == cuts_.end() || found->second <= events.now()) return arrives();
    const Time until = found->second;
    if (until - when > conditions.patience) {
      events.at(when + conditions.patience, std::move(gives_up));
    } else {
      deliver(from, to, until, std::move(arrives), std::move(gives_up));
    }
  });
}

void Network::listen(Machine machine, std::uint32_t epoch, Accept accept) {
  Listener& listener = listeners_[{machine, epoch}];
  for (auto& incoming : std::exchange(listener.early, {})) accept(std::move(incoming));
  listener.accept = std::move(accept);
}

void Network::stop_listening(Machine machine, std::uint32_t epoch) {
  listeners_[{machine, epoch}] = {.accept = nullptr, .is_over = true, .early = {}};
}

void Network::come(Machine machine, std::uint32_t epoch, std::unique_ptr<transport::IncomingConnection> incoming) {
  Listener& listener = listeners_[{machine, epoch}];
  if (listener.is_over || !is_alive(machine)) return;  // destroying it rejects it
  if (!listener.accept) return listener.early.push_back(std::move(incoming));
  listener.accept(std::move(incoming));
}

Bytes address_of(Machine machine, std::uint32_t epoch) {
  const std::uint32_t numbers[] = {machine, epoch};
  const auto bytes = std::as_bytes(std::span(numbers));
  return {bytes.begin(), bytes.end()};
}

}  // namespace bps::sim
