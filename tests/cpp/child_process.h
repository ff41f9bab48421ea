// SPDX-License-Identifier: Apache-2.0
// Runs a part of a test in a process of its own. The test's process must have no other thread while it forks.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <type_traits>
#include <utility>

namespace bps {

// Calls a body and ends. It is killed with this object, if it still runs.
class ChildProcess {
 public:
  // The body returns whether all was well, or its exit status, or nothing; what it throws is printed.
  template <typename Body>
  explicit ChildProcess(const Body& body) : pid_(::fork()) {
    EXPECT_GE(pid_, 0);
    if (pid_ != 0) return;
    int status = 0;
    try {
      if constexpr (std::is_void_v<decltype(body())>) {
        body();
      } else if constexpr (std::is_same_v<decltype(body()), bool>) {
        status = body() ? 0 : 1;
      } else {
        status = body();
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      status = 1;
    }
    ::_exit(status);
  }
  ~ChildProcess() {
    if (pid_ > 0) kill();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  // Returns when the process has ended.
  void kill() {
    signal(SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  // Returns when no thread of the process runs any more.
  void stop() const {
    signal(SIGSTOP);
    wait_until_stopped();
  }
  void wait_until_stopped() const {
    int status = 0;
    ASSERT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  // Waits for the end of the process, and returns its exit status; -1 where a signal has ended it.
  int status() {
    int status = 0;
    const bool has_ended = ::waitpid(std::exchange(pid_, 0), &status, 0) > 0;
    return has_ended && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // Waits for the end of the process. Returns true when its body has not thrown, and has found all well.
  bool ends_well() { return status() == 0; }

 private:
  pid_t pid_;
};

// Waits for ever, in the body of a process that is to be killed.
[[noreturn]] inline void stay() {
  for (;;) ::pause();
}

}  // namespace bps
