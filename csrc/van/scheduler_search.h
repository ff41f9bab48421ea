// SPDX-License-Identifier: Apache-2.0
// Looks for the scheduler that is started in the place of a lost one, on a thread of its own: connecting and shaking
// hands may block.
//
// Threading: it is made and destroyed on the thread of the loop, where it also reports. The destructor ends the search.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "core/event_loop.h"
#include "van/find_scheduler.h"

namespace bps::van {

class SchedulerSearch {
 public:
  using Find = std::function<FoundScheduler(const Deadline& deadline)>;  // as find_scheduler()
  struct Events {
    std::function<void(FoundScheduler&&)> on_found;
    std::function<void(const std::string& why)> on_given_up;  // after `patience_s`
  };

  SchedulerSearch(EventLoop& loop, double patience_s, Find find, Events events);
  ~SchedulerSearch();
  SchedulerSearch(const SchedulerSearch&) = delete;
  SchedulerSearch& operator=(const SchedulerSearch&) = delete;

 private:
  void run(double patience_s);

  EventLoop& loop_;
  const Find find_;
  const std::shared_ptr<const Events> events_;  // a function that runs after the destructor finds them gone
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace bps::van
