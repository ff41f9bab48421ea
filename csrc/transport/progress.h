// SPDX-License-Identifier: Apache-2.0
// Decides who makes progress on the transports and actors of a reactor: the holder of its progress lock. That is the
// reactor's own thread, or a caller that waits for an operation and works meanwhile.
//
// The thread releases the lock while it sleeps. A caller that would otherwise wake the thread, and then sleep until it
// is woken in turn, takes the lock and makes progress itself. That saves both hand-overs between threads, which cost
// more than a small tensor. When nothing arrives for a short while the caller sleeps where the thread sleeps, in
// epoll_wait() on the same descriptor. The kernel wakes the thread that came last, and a ring of the doorbell wakes
// only one. So what arrives next wakes the caller. When the caller leaves, it has armed everything for the thread,
// which has slept on and is sure to be woken.
//
// One caller at a time may sleep there. Should the thread be woken instead, it works, and calls the caller back
// (call_back()) if that was what the caller waits for.
//
// May be used from any thread. A progress lock may outlive its reactor, and then does nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/clock.h"
#include "core/fd.h"
#include "core/float_environment.h"

namespace bps::transport {

class Reactor;

class ProgressLock {
 public:
  enum class Outcome : std::uint8_t {
    kDone,
    kComeBack,   // it has been a while, or a signal came: the caller looks whether to go on
    kElsewhere,  // others make progress: the caller sleeps until they are done
  };

  explicit ProgressLock(Reactor& reactor);

  // Makes progress until `done()`, or for `at_most` and a little longer. The caller sleeps when nothing arrives; where
  // only the loop's thread may sleep, it returns after its spin time instead. Does nothing while another thread holds
  // the lock, or sleeps in the place of the loop's thread.
  template <typename Done>
  Outcome progress_until(Done done, Duration at_most) {
    {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock() && reactor_ != nullptr && !caller_sleeps_.load(std::memory_order_relaxed)) {
        const DefaultFloatEnvironment not_the_callers;
        const Turn turn(*this, at_most);  // also ends where what is found throws
        Outcome outcome = Outcome::kComeBack;
        while (!done()) {
          if (!progress_once(lock, outcome)) return done() ? Outcome::kDone : outcome;
        }
        return Outcome::kDone;
      }
    }
    wake();  // the holder of the lock may just be falling asleep
    return done() ? Outcome::kDone : Outcome::kElsewhere;
  }

  // Wakes the caller that sleeps: something that it may wait for has happened.
  void call_back() {
    if (!caller_sleeps_.load()) return;
    called_back_.store(true);
    ring();
  }

  // Wakes the thread if it sleeps. New work was put where the actors find it.
  void wake() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!asleep_.load(std::memory_order_relaxed) || !asleep_.exchange(false)) return;
    ring();
  }

 private:
  friend class Reactor;
  // Marks the turn of a caller that has the lock.
  class Turn {
   public:
    Turn(ProgressLock& lock, Duration at_most) : lock_(lock) { lock_.begin_progress(at_most); }
    ~Turn() { lock_.end_progress(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    ProgressLock& lock_;
  };
  void ring() { bps::ring(doorbell_.get()); }
  void begin_progress(Duration at_most);
  bool progress_once(std::unique_lock<std::mutex>& lock, Outcome& outcome);
  void end_progress() noexcept;

  std::mutex mutex_;  // held while making progress
  Reactor* reactor_;  // null once it has stopped
  std::atomic<bool> asleep_{false};
  std::atomic<bool> caller_sleeps_{false};  // written under the lock
  std::atomic<bool> called_back_{false};
  std::condition_variable caller_left_;  // a caller has left its sleep; waits under the lock
  const Fd doorbell_;                    // a copy of the event loop's, because the lock may outlive it
};

}  // namespace bps::transport
