// SPDX-License-Identifier: Apache-2.0
#include "node/dump_signal.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <utility>

#include "core/fd.h"
#include "core/fork.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps::node {
namespace {

// For the handler. They are never closed or reset: a handler may run at any time.
std::atomic<int> g_event{-1};
std::atomic<pid_t> g_process{0};

void wake(int /*signal*/) {
  const int error = errno;
  const std::uint64_t one = 1;
  if (g_event >= 0 && g_process == ::getpid()) (void)!::write(g_event, &one, sizeof one);
  errno = error;
}

void install() {
  struct sigaction now{};
  if (::sigaction(SIGUSR1, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction ours{};
  ours.sa_handler = wake;
  ours.sa_flags = SA_RESTART;
  ::sigemptyset(&ours.sa_mask);
  (void)::sigaction(SIGUSR1, &ours, nullptr);
}

}  // namespace

// One for each process; a forked child that joins a job of its own makes another one.
struct DumpThread {
  std::mutex mutex;
  const DumpOnSignal* current = nullptr;
  Fd event{::eventfd(0, EFD_CLOEXEC)};

  static DumpThread& of_this_process() {
    static std::mutex making;
    [[maybe_unused]] static const bool held = (hold_across_fork(making), true);
    static DumpThread* made = nullptr;  // lives as long as the process, as its thread does
    static std::uint32_t forks = 0;
    const std::lock_guard lock(making);
    if (made == nullptr || forks != fork_count()) {
      made = new DumpThread;
      forks = fork_count();
      made->start();
    }
    return *made;
  }

 private:
  void start() {
    if (!event) return log_warning("SIGUSR1 will show nothing: too many open files");
    try {
      start_thread([this] { run(); }).detach();
    } catch (const std::exception& error) {
      return log_warning(std::string("SIGUSR1 will show nothing: ") + error.what());
    }
    g_process = ::getpid();
    g_event = event.get();
    install();
  }

  void run() {
    name_thread("bps-dump");
    for (std::uint64_t count = 0;;) {
      if (::read(event.get(), &count, sizeof count) != sizeof count) {
        if (errno == EINTR) continue;
        return;
      }
      const std::lock_guard lock(mutex);
      if (current == nullptr) continue;
      std::string text = "bps DUMP ";
      text += current->text_();
      text += '\n';
      (void)std::fwrite(text.data(), 1, text.size(), stderr);
    }
  }
};

DumpOnSignal::DumpOnSignal(std::function<std::string()> text) : text_(std::move(text)) {
  DumpThread& thread = DumpThread::of_this_process();
  const std::lock_guard lock(thread.mutex);
  thread.current = this;
}

DumpOnSignal::~DumpOnSignal() {
  DumpThread& thread = DumpThread::of_this_process();
  const std::lock_guard lock(thread.mutex);
  if (thread.current == this) thread.current = nullptr;
}

}  // namespace bps::node
