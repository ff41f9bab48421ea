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
      spin_(std::chrono::microseconds(spin.thread_us)),
      caller_{.spin = std::chrono::microseconds(spin.caller_us)},
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

// Polls before it looks at descriptors, because that look is a system call. A sleep is a look, too.
void Reactor::run() {
  std::unique_lock progress(progress_->mutex_);
  const bool may_spin = spin_.is_allowed();
  Clock::time_point last_work{};
  for (unsigned rounds = 1; !stop_.load(std::memory_order_relaxed); ++rounds) {
    if (work()) {
      if (rounds % kRoundsPerTurn == 0) look(progress);
      if (may_spin) last_work = Clock::now();
      continue;
    }
    if (spin_.now() > Duration::zero()) {
      const bool found = look(progress) > 0;
      const auto now = Clock::now();
      if (found) last_work = now;
      if (now - last_work < spin_.now()) continue;
    }
    sleep(progress);
    if (!may_spin) continue;
    const auto now = Clock::now();
    spin_.learn(now - last_work);
    last_work = now;
  }
}

// Makes new work ring from now on. Returns false when there is some already.
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

// Looks at descriptors, and does not sleep. What is seen here does not wake a caller that sleeps, so that caller must
// have been let go.
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
  // A loop that finds work at the last moment also looks at the descriptors: that work may depend on one of them.
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
  caller_.id = std::this_thread::get_id();
  disarm();
  caller_.polls = 0;
  caller_.stays = at_most;
  caller_.leaves = {};
}

bool Reactor::progress_once(std::unique_lock<std::mutex>& progress, ProgressLock::Outcome& outcome) {
  if (work()) {
    caller_.idle_since = {};
    if (++caller_.polls % kRoundsPerTurn == 0) loop_.turn(Duration::zero());
    return caller_.polls < kLongestStay;
  }
  // An event of a descriptor that has not been read would wake the thread beside the caller, which is no gain.
  if (relies_on_descriptors() || stop_.load(std::memory_order_relaxed)) {
    outcome = ProgressLock::Outcome::kElsewhere;
    return false;
  }
  if (caller_.spin > Duration::zero()) {
    const auto now = Clock::now();
    if (caller_.idle_since == Clock::time_point()) caller_.idle_since = now;
    relax();
    if (now - caller_.idle_since < caller_.spin) return true;
    caller_.idle_since = {};
  }
  return sleep_in_stead(progress);
}

// Marks that a caller sleeps in the thread's place. The mark ends also when what it finds throws.
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

// Returns false when it is time to leave: nothing was found, perhaps because a signal came.
bool Reactor::sleep_in_stead(std::unique_lock<std::mutex>& progress) {
  if (!arm()) {
    loop_.turn(Duration::zero());
    disarm();
    return true;
  }
  int found = 0;
  {
    const Asleep asleep(*this);
    found = loop_.turn(blocked_ ? kBlockedSleep : caller_.stays, &progress);
  }
  if (found == 0 || stop_.load(std::memory_order_relaxed)) return false;
  const auto now = Clock::now();
  if (caller_.leaves == Clock::time_point()) caller_.leaves = now + caller_.stays;
  return now < caller_.leaves;
}

void Reactor::end_progress() noexcept {
  caller_.idle_since = {};
  if (!arm() || blocked_ || stop_.load(std::memory_order_relaxed)) loop_.wake();
  caller_.id = std::thread::id();
}

bool Reactor::relies_on_descriptors() const {
  return std::ranges::any_of(transports_, [](const auto& transport) { return transport->relies_on_descriptors(); });
}

}  // namespace bps::transport
