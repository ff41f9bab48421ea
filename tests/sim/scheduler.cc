// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace bps::sim {
namespace {

constexpr auto kCheck = std::chrono::milliseconds(50);

}  // namespace

Scheduler::Scheduler(Network& network, std::uint32_t workers, std::uint32_t servers, std::uint32_t least,
                     Duration silence)
    : network_(network), silence_(silence), options_(options(workers, servers, least, silence)) {
  start();
  network_.events.after(kCheck, [this] { check(); });
}

void Scheduler::start() {
  is_up_ = true;
  epoch_ = 1;
  job_.emplace(options_, van::Job::Events{
                             .send = [this](van::Peer peer, const van::Message& message) { tell(peer, message); },
                             .on_lost = nullptr,
                             .on_over = nullptr,
                             // Not from within Job, whose callbacks must not call back.
                             .close =
                                 [this](van::Peer peer) {
                                   network_.events.after({}, [this, peer] { close(peer, "closed by the scheduler"); });
                                 },
                             .on_epoch = [this](std::uint32_t epoch) { epoch_ = epoch; }});
}

void Scheduler::die() {
  views_ = views();
  is_up_ = false;
  const Time now = network_.events.now();
  for (auto& [peer, connection] : connections_) {
    if (!std::exchange(connection.open, false)) continue;
    connection.ends = now + network_.random.between({}, std::max(connection.last_down, now) - now);
    network_.events.at(connection.ends + travel(), [this, peer] { tell_end(peer); });
  }
}

van::Job::Options Scheduler::options(std::uint32_t workers, std::uint32_t servers, std::uint32_t least,
                                     Duration silence) {
  van::Job::Options made;
  made.registry.workers = workers;
  made.registry.servers = servers;
  made.terms.min_workers = least;
  made.silence_ms = static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::milliseconds>(silence).count());
  made.run = kRun;
  return made;
}

van::Peer Scheduler::connect(SchedulerClient client) {
  Connection& made = connections_[++last_];
  made.client = std::move(client);
  made.heard = network_.events.now();
  return last_;
}

void Scheduler::send(van::Peer peer, const van::Message& message) {
  Connection& connection = connections_.at(peer);
  connection.last_up = std::max(connection.last_up, network_.events.now() + travel());
  network_.events.at(connection.last_up, [this, peer, copy = van::Message(message)]() mutable {
    Connection& from = connections_.at(peer);
    if (!from.open) return;
    from.heard = network_.events.now();
    network_.trace.note("scheduler", peer, copy.index());
    has_left_ |= std::holds_alternative<van::Leave>(copy);
    if (!job_->receive(peer, std::move(copy))) close(peer, "it sent what it may not send");
    tell_departed();
  });
}

void Scheduler::hang_up(van::Peer peer) {
  Connection& connection = connections_.at(peer);
  connection.last_up = std::max(connection.last_up, network_.events.now() + travel());
  network_.events.at(connection.last_up, [this, peer] {
    connections_.at(peer).client.closed = nullptr;
    close(peer, "connection closed");
  });
}

// Takes effect when job_ has returned, as on a network.
void Scheduler::tell(van::Peer peer, const van::Message& message) {
  look_at(message);
  Connection& connection = connections_.at(peer);
  connection.last_down = std::max(connection.last_down, network_.events.now() + travel());
  network_.events.at(connection.last_down, [this, peer, message] {
    const Connection& to = connections_.at(peer);
    if (to.ends < network_.events.now()) return;
    if (network_.is_alive(to.client.machine)) to.client.receive(message);
  });
}

void Scheduler::look_at(const van::Message& message) {
  const auto* ended = std::get_if<van::EndShift>(&message);
  if (ended == nullptr) return;
  network_.trace.note(ended->links.empty() ? "shift off" : "shift done", ended->number);
  if (ended->links.empty()) {
    has_called_off_ |= ended->number == 1 && !has_left_;
  } else if (ended->number != last_shift_) {
    last_shift_ = ended->number;
    ++shifts_;
  }
}

void Scheduler::shift(const std::vector<std::uint64_t>& links) {
  if (is_up_ && job_->links() != nullptr) job_->links()->shift(links, network_.events.now());
}

void Scheduler::close(van::Peer peer, const std::string& why) {
  Connection& connection = connections_.at(peer);
  if (!std::exchange(connection.open, false)) return;
  network_.trace.say("closed", peer, why);
  network_.events.at(std::max(connection.last_down, network_.events.now() + travel()),
                     [this, peer] { tell_end(peer); });
  job_->closed(peer, why);
  tell_departed();
}

// Others may be gone by then.
void Scheduler::tell_departed() {
  network_.events.after(travel(), [this] {
    if (is_up_) job_->tell_departed();
  });
}

void Scheduler::tell_end(van::Peer peer) {
  const SchedulerClient& client = connections_.at(peer).client;
  if (client.closed && network_.is_alive(client.machine)) client.closed();
}

void Scheduler::check() {
  if (!is_up_) return network_.events.after(kCheck, [this] { check(); });
  std::vector<van::Peer> silent;
  for (const auto& [peer, connection] : connections_) {
    if (connection.open && network_.events.now() - connection.heard > silence_) silent.push_back(peer);
  }
  for (const van::Peer peer : silent) close(peer, "silent");
  if (const auto deadline = job_->join_deadline(); deadline && *deadline <= network_.events.now()) job_->give_up();
  if (job_->links() != nullptr) job_->links()->look(network_.events.now());
  if (job_->phase() != van::Job::Phase::kOver) network_.events.after(kCheck, [this] { check(); });
}

}  // namespace bps::sim
