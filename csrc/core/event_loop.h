// SPDX-License-Identifier: Apache-2.0
// Runs one epoll loop: it serves descriptors, timers, and functions posted by other threads.
//
// Everything but post() and wake() belongs to the thread that calls turn(). doorbell() is an eventfd: another process
// may hold a copy of it, and write to it in order to wake this loop. Functions run in the order in which they were
// posted.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/clock.h"
#include "core/fd.h"

namespace bps {

// Holds a function that a loop calls at a given time while this object lives. Destroying it, or assigning another
// timer, cancels the function, also from within it. Belongs to the loop's thread, and may outlive the loop.
class Timer {
 public:
  Timer() = default;
  // Returns true from the assignment of a loop's timer to that of an empty one, even after the function was called.
  bool is_set() const { return entry_ != nullptr; }

 private:
  friend class EventLoop;
  struct Entry {
    Clock::time_point due;
    Duration period;  // zero: it is called once
    std::function<void()> task;
  };
  explicit Timer(std::shared_ptr<Entry> entry) : entry_(std::move(entry)) {}

  std::shared_ptr<Entry> entry_;  // the loop holds only a weak reference to it
};

class EventLoop {
 public:
  using Ready = std::function<void(std::uint32_t events)>;

  EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Calls `ready` with the epoll events of `fd` until forget(fd). Level-triggered. `ready` may forget any of them.
  void watch(int fd, std::uint32_t events, Ready ready);
  void change(int fd, std::uint32_t events);
  void forget(int fd);
  // Reports nothing of `fd` for a while. Its system call lacks what the system is short of (is_shortage()), and as it
  // is level-triggered it would be reported again and again.
  void rest(int fd, double seconds = kRest_s);
  static constexpr double kRest_s = 0.001;

  // Calls `task` every `period_s` seconds, first after one period, until the timer is destroyed.
  [[nodiscard]] Timer every(double period_s, std::function<void()> task);
  // Calls `task` once, after `delay_s` seconds, unless the timer is destroyed before.
  [[nodiscard]] Timer after(double delay_s, std::function<void()> task);

  // Runs what was posted, and the timers that are due, without a look at descriptors. It is for a loop that somebody
  // else wakes, as a simulation does. next_due() returns when the next timer is due, max() if there is none.
  int run_due() { return run_posted() + run_timers(Clock::now()) + run_posted(); }
  Clock::time_point next_due() const;

  // Runs `task` on the loop soon. May be called from any thread. Returns false, and drops the task, once the loop is
  // closed.
  bool post(std::function<void()> task);
  // Comes on the loop's thread, after its last turn. Drops what was posted, and what is posted from now on.
  void close();
  // Makes a sleeping turn() return. May be called from any thread.
  void wake();
  int doorbell() const { return doorbell_.get(); }

  // Dispatches what is ready, and sleeps up to `wait` (zero: not at all) when nothing is. Returns how many functions it
  // ran. `while_asleep` is unlocked during the sleep: others who hold it may then call turn(), too.
  int turn(Duration wait, std::unique_lock<std::mutex>* while_asleep = nullptr);

 private:
  struct Watch {
    int fd;
    Ready ready;
    std::uint32_t events;
    bool rests = false;
    Timer end_of_rest{};
  };
  bool set(int operation, const Watch& watch);
  int wait_for_events(std::span<epoll_event> events, Duration wait);
  int run_posted();
  int run_timers(Clock::time_point now);

  Fd epoll_;
  Fd doorbell_;
  std::unordered_map<int, std::shared_ptr<Watch>> watches_;
  std::vector<std::weak_ptr<Timer::Entry>> timers_;  // those of destroyed timers are dropped when they are met
  unsigned turns_ = 0;
  std::mutex posted_mutex_;  // for set-up and rare events; the data path uses rings
  std::vector<std::function<void()>> posted_;
  bool closed_ = false;  // guarded by posted_mutex_
  std::atomic<bool> has_posted_{false};
};

}  // namespace bps
