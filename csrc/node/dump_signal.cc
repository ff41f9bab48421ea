// SPDX-License-Identifier: Apache-2.0
#include "node/dump_signal.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps::node {
namespace {

// For the handler, which may run at any time.
std::atomic<int> g_event{-1};
std::atomic<pid_t> g_process{0};
std::atomic<int> g_handlers{0};  // that may be about to write

void wake(int /*signal*/) {
  const int error = errno;
  ++g_handlers;
  const std::uint64_t one = 1;
  if (const int event = g_event; event >= 0 && g_process == ::getpid()) (void)!::write(event, &one, sizeof one);
  --g_handlers;
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

DumpOnSignal::DumpOnSignal(std::function<std::string()> text)
    : text_(std::move(text)), event_(::eventfd(0, EFD_CLOEXEC)) {
  try {
    if (!event_) throw Error(ErrorCode::kTransport, "too many open files", "raise `ulimit -n`");
    thread_ = start_thread([this] { run(); });
  } catch (const std::exception& error) {
    log_warning(std::string("SIGUSR1 will show nothing: ") + error.what());
    return;
  }
  g_process = ::getpid();
  g_event = event_.get();
  install();
}

DumpOnSignal::~DumpOnSignal() {
  if (!thread_.joinable()) return;
  int mine = event_.get();
  (void)g_event.compare_exchange_strong(mine, -1);
  while (g_handlers > 0) std::this_thread::yield();  // or one could write to what the descriptor's number means next
  ends_ = true;
  const std::uint64_t one = 1;
  (void)!::write(event_.get(), &one, sizeof one);
  thread_.join();
}

void DumpOnSignal::run() {
  name_thread("bps-dump");
  for (std::uint64_t count = 0;;) {
    if (::read(event_.get(), &count, sizeof count) != sizeof count && errno != EINTR) return;
    if (ends_) return;
    if (std::exchange(count, 0) == 0) continue;
    std::string text = "bps DUMP ";
    text += text_();
    text += '\n';
    (void)std::fwrite(text.data(), 1, text.size(), stderr);
  }
}

}  // namespace bps::node
