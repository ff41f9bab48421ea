// SPDX-License-Identifier: Apache-2.0
// Drives one event loop, the transports on it, and the actors that work with them, by a thread of its own.
//
// A turn looks at descriptors, polls the transports, and lets the actors step. When none of that finds work, the loop
// spins a learnt short while, and then sleeps until something rings. Everything an actor owns belongs to the holder of
// the progress lock: the thread, or a caller in its place (progress.h). Others reach it by post() and call().
//
// A watchdog on another thread sees that turns() goes on. It does so also without work, since a sleep ends by itself
// after a quarter of a second. The watchdog must not call a turn stuck that is_in_set_up().
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/event_loop.h"
#include "core/metrics.h"
#include "transport/progress.h"
#include "transport/transport.h"

namespace bps::transport {

class Actor {
 public:
  virtual ~Actor() = default;
  virtual bool step() = 0;             // returns true when it did something
  virtual bool arm() { return true; }  // comes before sleep: from now on wake() wakes the loop; false: there is work
  // Returns true when there is work that no event announces. The loop then sleeps for a millisecond at most.
  virtual bool blocked() const { return false; }
};

// Tells for how many microseconds a loop looks for work before it sleeps; 0 where cores are scarce.
struct Spin {
  int thread_us = 0;  // at most: the loop learns
  int caller_us = 0;
};

// Learns from the gaps between arrivals how long the thread of a loop looks for work before it sleeps.
class LearntSpin {
 public:
  explicit LearntSpin(Duration limit) : limit_(limit) {}
  bool is_allowed() const { return limit_ > Duration::zero(); }
  Duration now() const { return now_; }
  // Spinning is worth while for a mean gap that fits the limit, and not at all for a longer one.
  void learn(Duration gap) {
    mean_gap_ = (mean_gap_ * 7 + std::min<Duration>(gap, std::chrono::milliseconds(1))) / 8;
    now_ = mean_gap_ * 2 <= limit_ ? mean_gap_ * 2 : Duration::zero();
  }

 private:
  const Duration limit_;
  Duration now_{0};
  Duration mean_gap_{0};
};

class Reactor {
 public:
  Reactor(std::string name, Spin spin);
  ~Reactor();  // stops the thread
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  EventLoop& loop() { return loop_; }
  Counters& counters() { return counters_; }
  const std::shared_ptr<ProgressLock>& progress() const { return progress_; }

  // Is called before start(), or under the progress lock.
  void add(std::unique_ptr<Transport> transport) { transports_.push_back(std::move(transport)); }
  void add(Actor* actor) { actors_.push_back(actor); }

  void start();
  void stop();

  // May be called from any thread.
  const std::string& name() const { return name_; }
  std::uint64_t turns() const { return turns_.get(); }
  bool is_in_set_up() const { return in_set_up_.load(std::memory_order_relaxed); }
  // Marks work that takes as long as somebody's memory is large, on the thread that makes progress.
  class SetUp {
   public:
    explicit SetUp(Reactor* reactor) : reactor_(reactor) { set(true); }
    ~SetUp() { set(false); }
    SetUp(const SetUp&) = delete;
    SetUp& operator=(const SetUp&) = delete;

   private:
    void set(bool on) {
      if (reactor_ != nullptr) reactor_->in_set_up_.store(on, std::memory_order_relaxed);
    }
    Reactor* reactor_;  // null in some tests
  };

  // Runs `task` under the progress lock; before start() at once. A loop that hangs answers late or never, so what the
  // task refers to must live as long as the loop. Where the loop ends before, the promise is broken.
  template <typename F>
  auto ask(F task) -> std::future<decltype(task())> {
    auto packaged = std::make_shared<std::packaged_task<decltype(task())()>>(std::move(task));
    auto result = packaged->get_future();
    const auto self = std::this_thread::get_id();
    if (self == runner_.load() || self == caller_.id.load() || !started_.load()) {
      (*packaged)();
    } else {
      (void)loop_.post([packaged] { (*packaged)(); });
    }
    return result;
  }
  // Does the same, and waits for the result; exceptions come back to the caller. Throws kNotInitialized when the loop
  // has ended, or ends before. The caller may hold no lock that a task of this loop, or the thread that ends it, takes.
  template <typename F>
  auto call(F task) -> decltype(task()) {
    try {
      return ask(std::move(task)).get();
    } catch (const std::future_error&) {
      throw_ended();
    }
  }

 private:
  friend class ProgressLock;
  class Asleep;
  // Describes the caller that holds the progress lock.
  struct Caller {
    const Duration spin;
    std::atomic<std::thread::id> id{};
    unsigned polls = 0;              // how many, since it came
    Clock::time_point idle_since{};  // since when these polls have found no work; zero: the last one found work
    Duration stays{0};
    Clock::time_point leaves{};  // when it leaves at the latest, set after its first sleep
  };

  [[noreturn]] void throw_ended() const;
  void run();
  bool work();
  bool arm();
  void disarm();
  int look(std::unique_lock<std::mutex>& progress);
  void let_caller_go(std::unique_lock<std::mutex>& progress);
  void sleep(std::unique_lock<std::mutex>& progress);
  bool relies_on_descriptors() const;
  // ProgressLock calls these.
  void begin_progress(Duration at_most);
  bool progress_once(std::unique_lock<std::mutex>& progress, ProgressLock::Outcome& outcome);
  bool sleep_in_stead(std::unique_lock<std::mutex>& progress);
  void end_progress() noexcept;

  const std::string name_;
  EventLoop loop_;
  Counters counters_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Actor*> actors_;
  Counter turns_;
  std::atomic<bool> in_set_up_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> started_{false};
  std::atomic<std::thread::id> runner_{};  // the reactor's thread, until it ends
  LearntSpin spin_;
  Caller caller_;
  const std::shared_ptr<ProgressLock> progress_;
  bool blocked_ = false;  // as the last arm() found
  std::thread thread_;
};

}  // namespace bps::transport
