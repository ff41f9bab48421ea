// SPDX-License-Identifier: Apache-2.0
#include "core/memory_watch.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/clock.h"
#include "core/fd.h"
#include "core/limits.h"
#include "core/mappings.h"

namespace bps {
namespace {

// The oldest headers with which this is compiled do not have these.
constexpr int kUserModeOnly = 1;                   // Linux 5.11: allowed to everybody
constexpr auto kNewUserfaultfd = _IO(0xAA, 0x00);  // Linux 6.1, of /dev/userfaultfd
constexpr std::uint64_t kWriteProtection = 1;      // UFFD_FEATURE_PAGEFAULT_FLAG_WP, Linux 5.7
constexpr std::uint64_t kRegisterForWriteProtection = std::uint64_t{1} << 1;  // UFFDIO_REGISTER_MODE_WP
constexpr std::uint64_t kFeatures =
    kWriteProtection | UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_REMAP;

constexpr auto kMoment = std::chrono::microseconds(10);  // threads sleep so long: the monitor may have lower priority
constexpr int kAttempts = 16;
constexpr double kQuiet_s = 0.25;  // the longest wait for changes that are under way; each takes some 10 us

// Is odd while the monitor reads events, or notes what it has read.
constinit std::atomic<std::uint32_t> g_sequence{0};

// Waits until what was read has been noted.
std::uint32_t await_even() {
  for (;;) {
    const std::uint32_t sequence = g_sequence.load(std::memory_order_acquire);
    if ((sequence & 1) == 0) [[likely]]
      return sequence;
    std::this_thread::sleep_for(kMoment);
  }
}

Fd open_userfaultfd() {
  constexpr int kFlags = O_CLOEXEC | O_NONBLOCK;
  Fd made(static_cast<int>(::syscall(SYS_userfaultfd, kFlags | kUserModeOnly)));
  if (!made && errno == EINVAL) made = Fd(static_cast<int>(::syscall(SYS_userfaultfd, kFlags)));
  if (made) return made;
  const int error = errno;
  const Fd device(::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC));  // containers may have that and not the system call
  if (device) made = Fd(::ioctl(device.get(), kNewUserfaultfd, kFlags | kUserModeOnly));
  errno = error;
  return made;
}

MemoryWatch::Obstacle obstacle_behind(int error) {
  const std::string what =
      std::string("the kernel does not tell when memory is given back (userfaultfd: ") + std::strerror(error) + ")";
  if (error == EPERM || error == EACCES) {
    return {what,
            "allow the system call userfaultfd, as in `docker run --security-opt seccomp=PROFILE`, or give the "
            "container the device: `--device /dev/userfaultfd` (Linux 6.1)"};
  }
  if (const auto limit = limit_behind(error)) return {what + ": " + limit->what, limit->hint};
  return {what, "Linux 5.7 has it on x86-64, 6.10 on arm64"};
}

}  // namespace

class AddressMonitor {
 public:
  // Returns null where no memory can be watched.
  static AddressMonitor* get() {
    Instance& only = instance();
    const std::lock_guard lock(only.mutex);
    try_once(only);
    return only.monitor;
  }
  static MemoryWatch::Obstacle obstacle() {
    Instance& only = instance();
    const std::lock_guard lock(only.mutex);
    try_once(only);
    return only.obstacle;
  }

  explicit AddressMonitor(Fd events) : events_(std::move(events)) {
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of the application runs on the monitor
    try {
      std::thread([this] { run(); }).detach();
    } catch (...) {
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  bool watch(MemoryWatch& watch);
  void unwatch(MemoryWatch& watch);

 private:
  struct Instance {
    std::mutex mutex;  // guards the others
    bool tried = false;
    AddressMonitor* monitor = nullptr;  // is never destroyed
    MemoryWatch::Obstacle obstacle;
  };
  static Instance& instance() {
    static Instance& only = *[] {
      auto* made = new Instance;
      hold_across_fork(made->mutex);
      after_fork_in_child([] {  // the monitor is the parent's
        instance().tried = false;
        instance().monitor = nullptr;
        g_sequence = 0;
      });
      return made;
    }();
    return only;
  }
  static void try_once(Instance& only);

  [[noreturn]] void run();
  void note(std::span<const uffd_msg> events);
  void note(std::uintptr_t first, std::uintptr_t last, MemoryWatch::State state);
  bool is_changing() const;
  bool await_quiet() const;
  void release(std::uintptr_t first, std::uintptr_t last) const;

  const Fd events_;
  std::mutex mutex_;  // guards the list; see the header for what may be done under it
  MemoryWatch* watches_ = nullptr;
};

// The caller holds the lock of `only`.
void AddressMonitor::try_once(Instance& only) {
  if (std::exchange(only.tried, true)) return;
  Fd events = open_userfaultfd();
  uffdio_api api{.api = UFFD_API, .features = kFeatures, .ioctls = 0};
  if (!events || ::ioctl(events.get(), UFFDIO_API, &api) != 0) {
    only.obstacle = obstacle_behind(errno);
    return;
  }
  try {
    only.monitor = new AddressMonitor(std::move(events));
  } catch (const std::system_error&) {
    only.obstacle = {"there is no thread left that could watch memory", "raise the limit on threads (`ulimit -u`)"};
  }
}

// ---- The monitor's thread, which allocates nothing

void AddressMonitor::run() {
  ::pthread_setname_np(::pthread_self(), "bps-memory");
  std::array<uffd_msg, 16> events;
  for (;;) {
    pollfd waits{.fd = events_.get(), .events = POLLIN, .revents = 0};
    ::poll(&waits, 1, -1);
    g_sequence.fetch_add(1);
    const ssize_t bytes = ::read(events_.get(), events.data(), sizeof events);
    if (bytes > 0) note(std::span(events).first(static_cast<std::size_t>(bytes) / sizeof(uffd_msg)));
    g_sequence.fetch_add(1);
  }
}

void AddressMonitor::note(std::span<const uffd_msg> events) {
  using State = MemoryWatch::State;
  const std::lock_guard lock(mutex_);
  for (const uffd_msg& event : events) {
    const auto& remove = event.arg.remove;
    const auto& remap = event.arg.remap;
    switch (event.event) {
      case UFFD_EVENT_UNMAP: note(remove.start, remove.end, State::kGone); break;
      case UFFD_EVENT_REMOVE: note(remove.start, remove.end, State::kDiscarded); break;
      // The present place of the pages stays registered, for nobody. To end that would split the mapping, which the
      // application could not move as a whole any more.
      case UFFD_EVENT_REMAP: note(remap.from, remap.from + remap.len, State::kGone); break;
      default: break;
    }
  }
}

void AddressMonitor::note(std::uintptr_t first, std::uintptr_t last, MemoryWatch::State state) {
  for (MemoryWatch* one = watches_; one != nullptr; one = one->after_) {
    if (one->first_ >= last || one->last_ <= first) continue;
    if (one->state_.load(std::memory_order_relaxed) == MemoryWatch::State::kDiscarded) continue;
    one->state_.store(state, std::memory_order_release);
  }
}

// ---- Threads that watch

// Asks the kernel to fill no pages. It refuses to fill any while a change is under way, before it looks at which.
bool AddressMonitor::is_changing() const {
  uffdio_zeropage nothing{};
  return ::ioctl(events_.get(), UFFDIO_ZEROPAGE, &nothing) != 0 && errno == EAGAIN;
}

bool AddressMonitor::await_quiet() const {
  const Deadline deadline = Deadline::after(kQuiet_s);
  while (is_changing()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(kMoment);
  }
  (void)await_even();
  return true;
}

bool AddressMonitor::watch(MemoryWatch& watch) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    {
      const std::lock_guard lock(mutex_);
      if (!std::exchange(watch.listed_, true)) {
        watch.after_ = watches_;
        if (watches_ != nullptr) watches_->before_ = &watch;
        watches_ = &watch;
      }
      watch.state_.store(MemoryWatch::State::kIntact, std::memory_order_relaxed);
      uffdio_register range{.range = {.start = watch.first_, .len = watch.last_ - watch.first_},
                            .mode = kRegisterForWriteProtection,
                            .ioctls = 0};
      if (::ioctl(events_.get(), UFFDIO_REGISTER, &range) != 0) return false;
    }
    if (!await_quiet()) return false;
    const MemoryWatch::State noted = watch.state_.load(std::memory_order_acquire);
    if (noted != MemoryWatch::State::kGone) return noted == MemoryWatch::State::kIntact;
  }
  return false;
}

void AddressMonitor::unwatch(MemoryWatch& watch) {
  const std::lock_guard lock(mutex_);
  (watch.before_ != nullptr ? watch.before_->after_ : watches_) = watch.after_;
  if (watch.after_ != nullptr) watch.after_->before_ = watch.before_;
  release(watch.first_, watch.last_);
}

// Ends the registration of all pages but those that other watches are for. Those stay registered all the time: a kernel
// older than 5.19 may, at the next write, give a page whose registration has ended another place than a NIC knows.
void AddressMonitor::release(std::uintptr_t first, std::uintptr_t last) const {
  while (first < last) {
    const MemoryWatch* next = nullptr;  // the first one of those that overlap
    for (const MemoryWatch* one = watches_; one != nullptr; one = one->after_) {
      if (one->last_ > first && one->first_ < last && (next == nullptr || one->first_ < next->first_)) next = one;
    }
    const std::uintptr_t end = next == nullptr ? last : std::max(first, next->first_);
    uffdio_range range{.start = first, .len = end - first};
    // The kernel refuses this where other memory has been mapped meanwhile. There may be nothing left to end then.
    if (range.len > 0) (void)::ioctl(events_.get(), UFFDIO_UNREGISTER, &range);
    first = next == nullptr ? last : next->last_;
  }
}

// ---- Watches

std::unique_ptr<MemoryWatch> MemoryWatch::begin(std::span<const std::byte> bytes) {
  AddressMonitor* monitor = bytes.empty() ? nullptr : AddressMonitor::get();
  if (monitor == nullptr) return nullptr;
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t first = address / page * page;
  const std::uintptr_t last = (address + bytes.size() + page - 1) / page * page;
  std::unique_ptr<MemoryWatch> made(new MemoryWatch(*monitor, first, last));
  // The watch begins first, so that it notes memory that is replaced after the look at its kind.
  if (!monitor->watch(*made) || !is_private_anonymous(bytes)) return nullptr;
  return made;
}

MemoryWatch::~MemoryWatch() {
  if (listed_ && forks_ == fork_count()) monitor_.unwatch(*this);
}

bool MemoryWatch::is_intact() const {
  (void)await_even();
  return state_.load(std::memory_order_acquire) == State::kIntact;
}

bool MemoryWatch::is_discarded() const {
  return state_.load(std::memory_order_acquire) == State::kDiscarded;
}

std::uint32_t MemoryWatch::changes() {
  return await_even();
}

MemoryWatch::Obstacle MemoryWatch::obstacle() {
  return AddressMonitor::obstacle();
}

}  // namespace bps
