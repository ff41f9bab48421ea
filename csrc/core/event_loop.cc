// SPDX-License-Identifier: Apache-2.0
#include "core/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "core/error.h"
#include "core/system_calls.h"

namespace bps {
namespace {

constexpr unsigned kTurnsPerClock = 16;

}  // namespace

EventLoop::EventLoop() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), doorbell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !doorbell_) throw_errno("cannot create an event loop");
  // The doorbell is edge-triggered: every ring wakes one turn(), and nobody needs to read it.
  watch(doorbell_.get(), EPOLLIN | EPOLLET, [](std::uint32_t) {});
}

void EventLoop::watch(int fd, std::uint32_t events, Ready ready) {
  auto watch = std::make_shared<Watch>(Watch{fd, std::move(ready), events});
  if (!set(EPOLL_CTL_ADD, *watch)) throw_errno("cannot watch a descriptor");
  watches_[fd] = std::move(watch);
}

bool EventLoop::set(int operation, const Watch& watch) {
  epoll_event event{};
  event.events = watch.events;
  event.data.fd = watch.fd;
  return ::epoll_ctl(epoll_.get(), operation, watch.fd, &event) == 0;
}

void EventLoop::change(int fd, std::uint32_t events) {
  const auto found = watches_.find(fd);
  if (found == watches_.end()) return;
  found->second->events = events;
  if (!found->second->rests) (void)set(EPOLL_CTL_MOD, *found->second);
}

// Takes the descriptor out of epoll, which tells of errors whatever it is asked for.
void EventLoop::rest(int fd, double seconds) {
  const auto found = watches_.find(fd);
  if (found == watches_.end() || std::exchange(found->second->rests, true)) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  found->second->end_of_rest = after(seconds, [this, watch = found->second.get()] {  // the watch holds this timer
    watch->rests = false;
    (void)set(EPOLL_CTL_ADD, *watch);
  });
}

void EventLoop::forget(int fd) {
  if (watches_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

Timer EventLoop::every(double period_s, std::function<void()> task) {
  Timer timer = after(period_s, std::move(task));
  timer.entry_->period = to_duration(period_s);
  return timer;
}

Timer EventLoop::after(double delay_s, std::function<void()> task) {
  Timer timer(std::make_shared<Timer::Entry>(
      Timer::Entry{Clock::now() + to_duration(delay_s), Duration::zero(), std::move(task)}));
  timers_.push_back(timer.entry_);
  return timer;
}

bool EventLoop::post(std::function<void()> task) {
  {
    const std::lock_guard lock(posted_mutex_);
    if (closed_) return false;
    posted_.push_back(std::move(task));
    has_posted_.store(true, std::memory_order_release);
  }
  wake();
  return true;
}

void EventLoop::close() {
  std::vector<std::function<void()>> dropped;  // is destroyed after the lock is gone
  const std::lock_guard lock(posted_mutex_);
  closed_ = true;
  dropped.swap(posted_);
}

void EventLoop::wake() {
  ring(doorbell_.get());
}

int EventLoop::wait_for_events(std::span<epoll_event> events, Duration wait) {
  const auto size = static_cast<int>(events.size());
  const timespec timeout{.tv_sec = wait.count() / 1'000'000'000, .tv_nsec = wait.count() % 1'000'000'000};
  const int count = bps::epoll_pwait2(epoll_.get(), events.data(), size, &timeout);
  if (count >= 0 || (errno != ENOSYS && errno != EPERM)) return count;
  // Kernels before 5.11, and containers with old profiles, wait in milliseconds. The time is rounded up, so that no
  // loop spins for a timer.
  return ::epoll_wait(epoll_.get(), events.data(), size, static_cast<int>((wait.count() + 999'999) / 1'000'000));
}

int EventLoop::turn(Duration wait, std::unique_lock<std::mutex>* while_asleep) {
  int ran = run_posted();
  const unsigned turn = ++turns_;
  // The clock is read before a sleep, and now and then without one: reading it can cost a system call.
  if (wait > Duration::zero() || turn % kTurnsPerClock == 0) {
    const auto now = timers_.empty() ? Clock::time_point() : Clock::now();
    ran += run_timers(now);
    if (const auto due = next_due(); due != Clock::time_point::max()) {
      wait = std::min(wait, std::max(Duration::zero(), Duration(due - now)));
    }
  }
  if (ran > 0) wait = Duration::zero();
  std::array<epoll_event, 64> events;
  int count = 0;
  if (while_asleep == nullptr || wait == Duration::zero()) {
    count = wait_for_events(events, wait);
  } else {
    while_asleep->unlock();
    count = wait_for_events(events, wait);
    while_asleep->lock();
    // Another thread may have handled these events meanwhile, or closed their descriptors.
    if (turns_ != turn) count = wait_for_events(events, Duration::zero());
  }
  for (int i = 0; i < count; ++i) {
    const auto found = watches_.find(events[static_cast<std::size_t>(i)].data.fd);
    if (found == watches_.end()) continue;  // an earlier callback of this turn has forgotten it
    const std::shared_ptr<Watch> watch = found->second;
    watch->ready(events[static_cast<std::size_t>(i)].events);
    ++ran;
  }
  return ran + run_posted();
}

int EventLoop::run_posted() {
  if (!has_posted_.load(std::memory_order_acquire)) return 0;
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard lock(posted_mutex_);
    tasks.swap(posted_);
    has_posted_.store(false, std::memory_order_release);
  }
  for (auto& task : tasks) task();
  return static_cast<int>(tasks.size());
}

int EventLoop::run_timers(Clock::time_point now) {
  int ran = 0;
  // The loop goes by index, as a task may add timers.
  for (std::size_t i = 0; i < timers_.size(); ++i) {
    const std::shared_ptr<Timer::Entry> timer = timers_[i].lock();  // a task may destroy its own timer
    if (!timer || now < timer->due) continue;
    const bool again = timer->period > Duration::zero();
    timer->due = again ? now + timer->period : Clock::time_point::max();
    timer->task();
    ++ran;
  }
  std::erase_if(timers_, [](const auto& timer) { return timer.expired(); });
  return ran;
}

Clock::time_point EventLoop::next_due() const {
  auto first = Clock::time_point::max();
  for (const auto& weak : timers_) {
    if (const auto timer = weak.lock()) first = std::min(first, timer->due);
  }
  return first;
}

}  // namespace bps
