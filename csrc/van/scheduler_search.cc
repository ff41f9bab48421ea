// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler_search.h"

#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps::van {
namespace {

constexpr double kPauseSeconds = 0.2;

}  // namespace

SchedulerSearch::SchedulerSearch(EventLoop& loop, double patience_s, Find find, Events events)
    : loop_(loop),
      find_(std::move(find)),
      events_(std::make_shared<const Events>(std::move(events))),
      thread_(start_thread([this, patience_s] { run(patience_s); })) {}

SchedulerSearch::~SchedulerSearch() {
  stopping_ = true;
  thread_.join();
}

void SchedulerSearch::run(double patience_s) {
  name_thread("bps-search");
  struct Stopped {};
  const InterruptScope scope([this] {
    if (stopping_) throw Stopped{};
  });
  const Deadline deadline = Deadline::after(patience_s);
  const std::weak_ptr<const Events> events = events_;
  try {
    for (;;) {
      try {
        const auto found = std::make_shared<FoundScheduler>(find_(deadline));  // a posted function must be copyable
        loop_.post([events, found] {
          if (const auto to = events.lock()) to->on_found(std::move(*found));
        });
        return;
      } catch (const Error& error) {
        if (deadline.passed()) {
          loop_.post([events, why = std::string(error.what())] {
            if (const auto to = events.lock()) to->on_given_up(why);
          });
          return;
        }
      }
      // What listens there is no scheduler of this job, yet.
      sleep_until(Deadline::after(kPauseSeconds));
    }
  } catch (const Stopped&) {
  }
}

}  // namespace bps::van
