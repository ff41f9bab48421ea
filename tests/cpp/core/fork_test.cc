// SPDX-License-Identifier: Apache-2.0
#include "core/fork.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <thread>

#include "child_process.h"
#include "core/fd.h"

namespace bps {
namespace {

// What `body` answers in a forked child.
bool in_child(const std::function<bool()>& body) {
  return ChildProcess(body).ends_well();
}

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

Fd open_null() {
  return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

TEST(Fork, ChildrenDoNotInheritDescriptors) {
  Fd first = open_null();
  Fd second = open_null();
  const int plain = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int was = second.get();
  second.reset();
  Fd moved = std::move(first);
  EXPECT_TRUE(in_child([&] { return !is_open(moved.get()) && is_open(plain); }));
  EXPECT_TRUE(is_open(moved.get()));
  ::close(plain);
  EXPECT_FALSE(is_open(was));
}

TEST(Fork, AnInheritedObjectDoesNotCloseWhatTheChildHasOpened) {
  std::optional<Fd> inherited = open_null();
  EXPECT_TRUE(in_child([&] {
    const Fd own = open_null();
    if (own.get() != inherited->get()) return false;  // the number is free in the child
    inherited.reset();
    return is_open(own.get()) && in_child([&] { return !is_open(own.get()); });
  }));
}

TEST(Fork, ForksAreCountedInTheChildOnly) {
  const std::uint32_t before = fork_count();
  EXPECT_TRUE(in_child([&] { return fork_count() == before + 1; }));
  EXPECT_EQ(fork_count(), before);
}

TEST(Fork, AMutexIsFreeInTheChild) {
  static auto& mutex = *new std::mutex;
  static int guarded = 0;
  hold_across_fork(mutex);
  std::atomic<bool> over{false};
  std::thread user([&] {
    while (!over) {
      const std::lock_guard lock(mutex);
      ++guarded;
      ++guarded;
    }
  });
  bool good = true;
  for (int i = 0; i < 50; ++i) {
    good &= in_child([] {
      const std::lock_guard lock(mutex);
      return guarded % 2 == 0;
    });
  }
  over = true;
  user.join();
  EXPECT_TRUE(good);
}

}  // namespace
}  // namespace bps
