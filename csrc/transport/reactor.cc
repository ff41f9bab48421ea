// SPDX-License-Identifier: Apache-2.0
#include "transport/reactor.h"

#include <fcntl.h>

#include <algorithm>

#include "core/log.h"
#include "core/threads.h"

namespace bps::transport {
namespace {

constexpr Duration kLongestSleep = std::chrono::milliseconds(250);
constexpr Duration kBlockedSleep = std::chrono::milliseconds(1);
constexpr unsigned kRoundsPerTurn = 4;      // of polled work, before descriptors are looked at again
constexpr unsigned kLongestStay = 1 << 14;  // polls, after which a caller checks whether it was interrupted

Fd duplicate(int fd) {
  Fd made(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!made) throw_errno("cannot duplicate a descriptor");
  return made;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ProgressLock::ProgressLock(Reactor& reactor) : reactor_(&reactor), doorbell_(duplicate(reactor.loop().doorbell())) {}
void ProgressLock::begin_progress(Duration at_most) {
  reactor_->begin_progress(at_most);
}
bool ProgressLock::progress_once(std::unique_lock<std::mutex>& lock, Outcome& outcome) {
  return reactor_->progress_once(lock, outcome);
}
void ProgressLock::end_progress() noexcept {
  reactor_->end_progress();
}

Reactor::Reactor(std::string name, Spin spin)
    : name_(std::move(name)),
      spin_limit_(std::chrono::microseconds(spin.thread_us)),
      caller_spin_(std::chrono::microseconds(spin.caller_us)),
      progress_(std::make_shared<ProgressLock>(*this)) {}

Reactor::~Reactor() {
  stop();
}

void Reactor::start() {
  thread_ = start_thread([this] {
    name_thread(name_);
    const DefaultFloatEnvironment not_the_makers;
    runner_ = std::this_thread::get_id();
    run();
    loop_.close();
    runner_ = std::thread::id();
  });
  started_ = true;
}

void Reactor::throw_ended() const {
  throw Error(ErrorCode::kNotInitialized, "the loop " + name_ + " has ended: this process leaves the job",
              "call init() again");
}

void Reactor::stop() {
  stop_ = true;
  loop_.wake();
  if (thread_.joinable()) thread_.join();
  std::unique_lock progress(progress_->mutex_);
  let_caller_go(progress);
  progress_->reactor_ = nullptr;
}

bool Reactor::work() {
  turns_.add();
  bool found = false;
  for (const auto& transport : transports_) found |= transport->poll() > 0;
  for (std::size_t i = 0; i < actors_.size(); ++i) found |= actors_[i]->step();
  return found;
}

// Descriptors are looked at by a system call, so that what can be polled is polled first, and a sleep is the look.
void Reactor::run() {
  std::unique_lock progress(progress_->mutex_);
  const bool may_spin = spin_limit_ > Duration::zero();
  Clock::time_point last_work{};
  for (unsigned rounds = 1; !stop_.load(std::memory_order_relaxed); ++rounds) {
    if (work()) {
      if (rounds % kRoundsPerTurn == 0) look(progress);
      if (may_spin) last_work = Clock::now();
      continue;
    }
    if (spin_ > Duration::zero()) {
      const bool found = look(progress) > 0;
      const auto now = Clock::now();
      if (found) last_work = now;
      if (now - last_work < spin_) continue;
    }
    sleep(progress);
    if (!may_spin) continue;
    // Learn: a mean gap that fits the limit is worth spinning for, a longer one is not worth spinning at all.
    const auto now = Clock::now();
    const Duration gap = now - last_work;
    mean_gap_ = (mean_gap_ * 7 + std::min<Duration>(gap, std::chrono::milliseconds(1))) / 8;
    spin_ = mean_gap_ * 2 <= spin_limit_ ? mean_gap_ * 2 : Duration::zero();
    last_work = now;
  }
}

// From now on, work rings. False when there is some already.
bool Reactor::arm() {
  progress_->asleep_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  blocked_ = false;
  const bool ready = std::ranges::all_of(transports_, [](const auto& transport) { return transport->arm(); });
  for (const Actor* actor : actors_) blocked_ |= actor->blocked();
  return ready && std::ranges::all_of(actors_, [](Actor* actor) { return actor->arm(); });
}

void Reactor::disarm() {
  progress_->asleep_.store(false, std::memory_order_relaxed);
  for (const auto& transport : transports_) transport->disarm();
}

// Looks at descriptors, and does not sleep. What is seen here does not wake a caller that sleeps: it must have been let
// go.
int Reactor::look(std::unique_lock<std::mutex>& progress) {
  if (progress_->called_back_.load(std::memory_order_relaxed)) let_caller_go(progress);
  return loop_.turn(Duration::zero());
}

// Waits until the caller that sleeps, and has been called back or is to leave, is awake. Nobody else sleeps in the
// event loop meanwhile, so that the doorbell wakes the caller.
void Reactor::let_caller_go(std::unique_lock<std::mutex>& progress) {
  if (!progress_->caller_sleeps_) return;
  progress_->ring();
  progress_->caller_left_.wait(progress, [this] { return !progress_->caller_sleeps_; });
}

void Reactor::sleep(std::unique_lock<std::mutex>& progress) {
  const bool ready = arm();
  // Also who finds work at the last moment looks at the descriptors: that work may be held up until one of them is.
  if (!ready) {
    look(progress);
  } else {
    if (progress_->called_back_.load(std::memory_order_relaxed)) let_caller_go(progress);
    loop_.turn(blocked_ ? kBlockedSleep : kLongestSleep, &progress);
    counters_.wakeups.add();
  }
  disarm();
}

// ---- A caller that holds the progress lock

void Reactor::begin_progress(Duration at_most) {
  caller_ = std::this_thread::get_id();
  disarm();
  polls_ = 0;
  caller_stays_ = at_most;
  caller_leaves_ = {};
}

bool Reactor::progress_once(std::unique_lock<std::mutex>& progress, ProgressLock::Outcome& outcome) {
  if (work()) {
    idle_since_ = {};
    if (++polls_ % kRoundsPerTurn == 0) loop_.turn(Duration::zero());
    return polls_ < kLongestStay;
  }
  // An event of a descriptor that has not been read wakes the thread beside the caller: that would be no gain.
  if (relies_on_descriptors() || stop_.load(std::memory_order_relaxed)) {
    outcome = ProgressLock::Outcome::kElsewhere;
    return false;
  }
  if (caller_spin_ > Duration::zero()) {
    const auto now = Clock::now();
    if (idle_since_ == Clock::time_point()) idle_since_ = now;
    relax();
    if (now - idle_since_ < caller_spin_) return true;
    idle_since_ = {};
  }
  return sleep_in_stead(progress);
}

// Marks that a caller sleeps in the thread's stead, and ends that also where what it finds throws.
class Reactor::Asleep {
 public:
  explicit Asleep(Reactor& reactor) : reactor_(reactor) { reactor_.progress_->caller_sleeps_ = true; }
  ~Asleep() {
    reactor_.progress_->caller_sleeps_ = false;
    reactor_.progress_->called_back_ = false;
    reactor_.progress_->caller_left_.notify_all();
    reactor_.counters_.wakeups.add();
    reactor_.disarm();
  }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  Reactor& reactor_;
};

// False when it is time to leave: nothing was found, perhaps because a signal came.
bool Reactor::sleep_in_stead(std::unique_lock<std::mutex>& progress) {
  if (!arm()) {
    loop_.turn(Duration::zero());
    disarm();
    return true;
  }
  int found = 0;
  {
    const Asleep asleep(*this);
    found = loop_.turn(blocked_ ? kBlockedSleep : caller_stays_, &progress);
  }
  if (found == 0 || stop_.load(std::memory_order_relaxed)) return false;
  const auto now = Clock::now();
  if (caller_leaves_ == Clock::time_point()) caller_leaves_ = now + caller_stays_;
  return now < caller_leaves_;
}

void Reactor::end_progress() noexcept {
  idle_since_ = {};
  if (!arm() || blocked_ || stop_.load(std::memory_order_relaxed)) loop_.wake();
  caller_ = std::thread::id();
}

bool Reactor::relies_on_descriptors() const {
  return std::ranges::any_of(transports_, [](const auto& transport) { return transport->relies_on_descriptors(); });
}

}  // namespace bps::transport
