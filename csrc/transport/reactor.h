// One thread: an event loop, the transports on it, and the actors that work with them.
//
// A turn looks at descriptors, polls the transports, lets the actors step, and, when none of that found work, spins a
// learnt short while and then sleeps until something rings. Everything an actor owns belongs to this thread; others
// reach it by post() and call().
#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/event_loop.h"
#include "core/metrics.h"
#include "transport/transport.h"

namespace bps {

class Actor {
 public:
  virtual ~Actor() = default;
  virtual bool step() = 0;             // true when it did something
  virtual bool arm() { return true; }  // before sleep: from now on, work wakes the loop; false: there is work
  virtual void disarm() {}
  virtual bool blocked() const { return false; }  // has work that no event announces: look again soon
};

class Reactor {
 public:
  // spin_limit_us: the longest spin before sleep; 0 where cores are scarce.
  Reactor(std::string name, int spin_limit_us);
  ~Reactor();  // stops the thread
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  EventLoop& loop() { return loop_; }
  Counters& counters() { return counters_; }

  // Before start(), or on the thread itself.
  void add(std::unique_ptr<Transport> transport) { transports_.push_back(std::move(transport)); }
  void add(Actor* actor) { actors_.push_back(actor); }
  void remove(Actor* actor) { std::erase(actors_, actor); }
  Transport* transport(std::string_view name) const;

  void start();
  void stop();

  // Runs `task` on the thread and waits for it; exceptions come back to the caller.
  template <typename F>
  auto call(F task) -> decltype(task()) {
    if (std::this_thread::get_id() == thread_.get_id() || !thread_.joinable()) return task();
    auto packaged = std::make_shared<std::packaged_task<decltype(task())()>>(std::move(task));
    auto result = packaged->get_future();
    loop_.post([packaged] { (*packaged)(); });
    return result.get();
  }

 private:
  void run();
  bool work();
  void sleep();

  const std::string name_;
  const Duration spin_limit_;
  EventLoop loop_;
  Counters counters_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Actor*> actors_;
  std::atomic<bool> stop_{false};
  Duration spin_{0};  // learnt: long enough for the last gaps between arrivals, or nothing
  Duration mean_gap_{0};
  std::thread thread_;
};

}  // namespace bps
