// SPDX-License-Identifier: Apache-2.0
// The progress lock of a reactor: its holder makes progress on the reactor's transports and actors. That is the
// reactor's own thread, or a caller that waits for an operation and works meanwhile.
//
// The thread releases the lock while it sleeps. A caller that would otherwise wake the thread, and then sleep until it
// is woken in turn, takes the lock and makes progress itself: that saves both hand-overs between threads, which cost
// more than a small tensor. When nothing arrives for a short while the caller releases the lock, with everything armed
// on the thread's behalf, which has slept on and is sure to be woken.
//
// Threading: from any thread. A progress lock may outlive its reactor, and then does nothing.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/fd.h"

namespace bps::transport {

class Reactor;

class ProgressLock {
 public:
  explicit ProgressLock(Reactor& reactor);

  // Makes progress until `done()`, or until nothing has arrived for the caller's spin time; does nothing while another
  // thread holds the lock. Returns what done() answers then.
  template <typename Done>
  bool progress_until(Done done) {
    {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock() && reactor_ != nullptr) {
        begin_progress();
        bool over = done();
        while (!over && progress_once()) over = done();
        end_progress();
        return over;
      }
    }
    wake();  // the holder of the lock may just be falling asleep
    return done();
  }

  // There is new work, which was put where the actors find it: wakes the thread if it sleeps.
  void wake() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!asleep_.load(std::memory_order_relaxed) || !asleep_.exchange(false)) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(doorbell_.get(), &one, sizeof one);
  }

 private:
  friend class Reactor;
  void begin_progress();
  bool progress_once();
  void end_progress();

  std::mutex mutex_;  // held while making progress
  Reactor* reactor_;  // null once it has stopped
  std::atomic<bool> asleep_{false};
  const Fd doorbell_;  // a copy of the event loop's, because we may outlive it
};

}  // namespace bps::transport
