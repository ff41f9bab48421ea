// SPDX-License-Identifier: Apache-2.0
#include "python/stacks.h"

#include <pybind11/pybind11.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "core/threads.h"

namespace py = pybind11;

namespace bps::python {
namespace {

// A thread that runs Python code hands the lock over within 5 ms of running.
constexpr auto kPatience = std::chrono::milliseconds(400);
constexpr auto kPatienceAtEnd = std::chrono::seconds(2);

// Holds one attempt to get the lock. Its thread may outlive who asked.
struct Attempt {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::string text;
};

std::mutex g_mutex;
std::shared_ptr<Attempt> g_last;  // guarded by g_mutex

bool is_over(Attempt& attempt, std::chrono::milliseconds patience) {
  std::unique_lock lock(attempt.mutex);
  return attempt.changed.wait_for(lock, patience, [&] { return attempt.over; });
}

void attempt_with_lock(const std::shared_ptr<Attempt>& attempt, const std::function<std::string()>& text) {
  std::string found;
  try {
    const py::gil_scoped_acquire lock;
    found = text();
  } catch (const std::exception&) {  // there is no text
  }
  const std::lock_guard lock(attempt->mutex);
  attempt->text = std::move(found);
  attempt->over = true;
  attempt->changed.notify_all();
}

std::string by_signal(int signal, int file) {
  struct sigaction now{};
  if (::sigaction(signal, nullptr, &now) != 0 || now.sa_handler == SIG_DFL) return "";  // it would end the process
  std::string text(kMostStackBytes, '\0');
  if (::pwrite(file, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) return "";
  if (::lseek(file, 0, SEEK_SET) != 0 || ::raise(signal) != 0) return "";
  if (::pread(file, text.data(), text.size(), 0) < 0) return "";
  text.resize(std::min(text.find('\0'), text.size()));
  return text;
}

}  // namespace

std::function<std::string()> shows_stacks(std::function<std::string()> text, int signal, int file) {
  const auto shared = std::make_shared<std::function<std::string()>>(std::move(text));
  return [shared, signal, file]() -> std::string {
    const std::lock_guard one(g_mutex);
    if (!g_last || is_over(*g_last, std::chrono::milliseconds(0))) {
      g_last = std::make_shared<Attempt>();
      start_thread([attempt = g_last, shared] { attempt_with_lock(attempt, *shared); }).detach();
    }
    return is_over(*g_last, kPatience) ? g_last->text : by_signal(signal, file);
  };
}

void await_stacks() {
  const std::lock_guard one(g_mutex);
  if (g_last) (void)is_over(*g_last, kPatienceAtEnd);
  g_last.reset();
}

}  // namespace bps::python
