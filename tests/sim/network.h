// SPDX-License-Identifier: Apache-2.0
// A network in virtual time, and machines on it that stop, die and are cut off.
//
// A machine is where one process runs: the network delivers to it and wakes it, but only the process itself decides
// what to do. Each machine sends at a limited rate; what it sends arrives after a delay that is drawn for each message,
// so that writes overtake each other. Of a path that is cut for a while nothing is lost, as in TCP and RDMA: it arrives
// later, or, when that takes too long, the sender gives the connection up.
//
// One thread. The same seed gives the same events in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "event_queue.h"
#include "random.h"
#include "tap.h"
#include "trace.h"
#include "transport/transport.h"

namespace bps::sim {

using Machine = std::uint32_t;

struct Conditions {
  Duration delay{};   // of one direction, at least
  Duration jitter{};  // and this much more, at most
  double bytes_per_s = 1e9;
  std::size_t window = 16;  // writes under way on one connection
  double refuse = 0;        // chance that a connection accepts less than it is given
  Duration patience{};      // of a sender, with a path that is cut
  // Whether writes pass through the receiving process, as over TCP: it is asked first, and a process that is stopped
  // receives nothing. A NIC writes past it.
  bool by_process = false;
  // Between processes of one host, whose connections reach the memory of the other end.
  bool maps_all = false;   // callers' memory is mapped, and not copied by system calls
  bool may_fence = false;  // a process may end another one
};

class Network {
 public:
  Network(EventQueue& queue, Random& drawn, Trace& notes, const Conditions& its)
      : conditions(its), events(queue), random(drawn), trace(notes) {}

  // `step` is called when something has arrived, or when wake_at() has asked for it, while the machine runs.
  Machine add(std::function<void()> step);
  void wake(Machine machine) { wake_at(machine, events.now() + random.between({}, std::chrono::microseconds(5))); }
  void wake_at(Machine machine, Time when);

  // What happens to machines and paths.
  void pause(Machine machine, Time until);
  void kill(Machine machine) { machines_[machine].alive = false; }
  void cut(Machine from, Machine to, Time until) { cuts_[{from, to}] = until; }
  bool is_alive(Machine machine) const { return machines_[machine].alive; }
  bool runs(Machine machine) const { return is_alive(machine) && machines_[machine].paused_until <= events.now(); }
  Time runs_from(Machine machine) const { return machines_[machine].paused_until; }

  // Where machines share a host: by machine.
  void place(const std::vector<std::uint32_t>& host_of) { host_of_ = host_of; }
  bool share_host(Machine one, Machine other) const {
    return one < host_of_.size() && other < host_of_.size() && host_of_[one] == host_of_[other];
  }
  // Ends the process of a machine, as another one of its host demands.
  std::function<void(Machine)> fence;

  // When what leaves `from` now arrives at `to`, by itself and behind `bytes` of others.
  Time arrival(Machine from, std::uint64_t bytes);
  // Calls `arrives` at `when`, or, while the path is cut, when it is not any more; `gives_up` instead when the sender's
  // patience has ended by then.
  void deliver(Machine from, Machine to, Time when, std::function<void()> arrives, std::function<void()> gives_up);

  // Connections to `machine` in one view are handed to `accept`, those that have come before among them.
  using Accept = std::function<void(std::unique_ptr<transport::IncomingConnection>)>;
  void listen(Machine machine, std::uint32_t epoch, Accept accept);
  void stop_listening(Machine machine, std::uint32_t epoch);
  void come(Machine machine, std::uint32_t epoch, std::unique_ptr<transport::IncomingConnection> incoming);

  const Conditions conditions;
  EventQueue& events;
  Random& random;
  Trace& trace;
  Tap* tap = nullptr;  // null: nobody listens

 private:
  struct State {
    std::function<void()> step;
    bool alive = true;
    Time paused_until{};
    Time sends_from{};  // it is busy with sending until then
    Time wakes_at = Time::max();
    std::uint64_t wake = 0;  // number of the plan that counts
  };
  void plan_wake(Machine machine);

  std::vector<State> machines_;
  std::vector<std::uint32_t> host_of_;
  std::map<std::pair<Machine, Machine>, Time> cuts_;
  struct Listener {
    Accept accept;
    bool is_over = false;
    std::vector<std::unique_ptr<transport::IncomingConnection>> early;
  };
  std::map<std::pair<Machine, std::uint32_t>, Listener> listeners_;
};

// The address of a machine's listener in one view, as a ConnectRequest names it.
Bytes address_of(Machine machine, std::uint32_t epoch);

}  // namespace bps::sim
