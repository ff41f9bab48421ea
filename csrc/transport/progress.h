// Who works on a reactor right now: its own thread, or a caller who waits for something and works meanwhile.
//
// The thread leaves the progress free while it sleeps. A caller that would wake it, and then sleep until it is woken in
// turn, takes the progress and works on the spot: that saves both hand-overs between threads, which cost more than a
// small tensor itself. When nothing comes for a short while the caller leaves, with everything armed on the thread's
// behalf: that one has slept on and is sure to be woken.
//
// Threading: from any thread. A progress may outlive its reactor, and then does nothing.
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

  // Works until `done()`, or until nothing has come for the caller's spin time, or not at all while somebody else does.
  // Returns what done() says then.
  template <typename Done>
  bool drive(Done done) {
    {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock() && reactor_ != nullptr) {
        begin_progress();
        bool over = done();
        while (!over && look()) over = done();
        end_progress();
        return over;
      }
    }
    wake();  // whoever works there may just be falling asleep
    return done();
  }

  // There is new work, which was put where the actors look for it: wakes the thread if it sleeps.
  void wake() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!asleep_.load(std::memory_order_relaxed) || !asleep_.exchange(false)) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(bell_.get(), &one, sizeof one);
  }

 private:
  friend class Reactor;
  void begin_progress();
  bool look();
  void end_progress();

  std::mutex mutex_;  // held by whoever works
  Reactor* reactor_;  // null once it has stopped
  std::atomic<bool> asleep_{false};
  const Fd bell_;  // the event loop's doorbell, of our own, as we may outlive it
};

}  // namespace bps::transport
