// SPDX-License-Identifier: Apache-2.0
// A process of its own for a part of a test. The test's process must have no other thread while it forks.
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

// Calls a body and ends; is killed with this object, if it still runs.
class ChildProcess {
 public:
  // The body returns whether all was well, or nothing; what it throws is printed.
  template <typename Body>
  explicit ChildProcess(const Body& body) : pid_(::fork()) {
    EXPECT_GE(pid_, 0);
    if (pid_ != 0) return;
    bool is_well = true;
    try {
      if constexpr (std::is_void_v<decltype(body())>) {
        body();
      } else {
        is_well = body();
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      is_well = false;
    }
    ::_exit(is_well ? 0 : 1);
  }
  ~ChildProcess() {
    if (pid_ > 0) kill();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void signal(int number) const { ::kill(pid_, number); }
  // Returns when it has ended.
  void kill() {
    signal(SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  // Returns when none of its threads runs any more.
  void stop() const {
    signal(SIGSTOP);
    wait_until_stopped();
  }
  void wait_until_stopped() const {
    int status = 0;
    ASSERT_EQ(::waitpid(pid_, &status, WUNTRACED), pid_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  // Waits for its end; whether its body has not thrown, and has found all well.
  bool ends_well() {
    int status = 0;
    const bool has_ended = ::waitpid(std::exchange(pid_, 0), &status, 0) > 0;
    return has_ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  pid_t pid_;
};

// For a body whose process is to be killed.
[[noreturn]] inline void stay() {
  for (;;) ::pause();
}

}  // namespace bps
