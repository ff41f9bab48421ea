// SPDX-License-Identifier: Apache-2.0
#include "core/memory_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "child_process.h"
#include "core/fd.h"
#include "core/mappings.h"
#include "watched_memory.h"

namespace bps {
namespace {

const std::size_t kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS;

std::byte* map(std::size_t pages, int flags = kPrivate, int fd = -1, void* at = nullptr) {
  void* memory = ::mmap(at, pages * kPage, PROT_READ | PROT_WRITE, flags, fd, 0);
  EXPECT_NE(memory, MAP_FAILED);
  return static_cast<std::byte*>(memory);
}

std::unique_ptr<MemoryWatch> watch(const std::byte* first, std::size_t pages) {
  return MemoryWatch::begin({first, pages * kPage});
}

class MemoryWatchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_memory_is_not_watched(); !why.empty()) GTEST_SKIP() << why;
  }
};

struct Change {
  const char* name;
  std::function<void(std::byte* first)> make;  // of 16 pages, of which those from the fifth to the twelfth are watched
  bool is_noted = true;
  bool discards = false;
};

const Change kChanges[] = {
    {"unmap", [](std::byte* first) { ::munmap(first, 16 * kPage); }},
    {"unmap one page", [](std::byte* first) { ::munmap(first + 7 * kPage, kPage); }},
    {"unmap the first page", [](std::byte* first) { ::munmap(first, 5 * kPage); }},
    {"unmap the last page", [](std::byte* first) { ::munmap(first + 11 * kPage, 5 * kPage); }},
    {"map others over one page", [](std::byte* first) { map(1, kPrivate | MAP_FIXED, -1, first + 7 * kPage); }},
    {"move", [](std::byte* first) { ::mremap(first + 4 * kPage, 8 * kPage, 64 * kPage, MREMAP_MAYMOVE); }},
    {"move and leave others",
     [](std::byte* first) {  // by the system call: the C library passes no place
       const std::size_t size = 8 * kPage;
       ::syscall(SYS_mremap, first + 4 * kPage, size, size, MREMAP_MAYMOVE | 4 /* MREMAP_DONTUNMAP */, nullptr);
     }},
    {"shrink", [](std::byte* first) { ::mremap(first + 4 * kPage, 8 * kPage, 7 * kPage, 0); }},
    {"discard", [](std::byte* first) { ::madvise(first, 16 * kPage, MADV_DONTNEED); }, true, true},
    {"discard one page", [](std::byte* first) { ::madvise(first + 5 * kPage, kPage, MADV_DONTNEED); }, true, true},
    {"free lazily", [](std::byte* first) { ::madvise(first + 5 * kPage, kPage, MADV_FREE); }, true, true},
    {"write", [](std::byte* first) { std::fill_n(first, 16 * kPage, std::byte{7}); }, false},
    {"unmap what is not watched",
     [](std::byte* first) {
       ::munmap(first, 4 * kPage);
       ::munmap(first + 12 * kPage, 4 * kPage);
     },
     false},
    {"discard what is not watched", [](std::byte* first) { ::madvise(first, 4 * kPage, MADV_DONTNEED); }, false},
    {"protect",
     [](std::byte* first) {
       ::mprotect(first, 16 * kPage, PROT_READ);
       ::mprotect(first, 16 * kPage, PROT_READ | PROT_WRITE);
     },
     false},
    {"advise huge pages", [](std::byte* first) { ::madvise(first, 16 * kPage, MADV_HUGEPAGE); }, false},
};

TEST_F(MemoryWatchTest, NotesWhatGivesPagesBackAndNothingElse) {
  for (const Change& change : kChanges) {
    std::byte* memory = map(16);
    std::fill_n(memory, 16 * kPage, std::byte{1});
    // Its first and last bytes are within a page.
    const auto made = MemoryWatch::begin({memory + 4 * kPage + 100, 8 * kPage - 200});
    ASSERT_TRUE(made) << change.name;
    EXPECT_TRUE(made->is_intact()) << change.name;
    change.make(memory);
    EXPECT_EQ(made->is_intact(), !change.is_noted) << change.name;
    EXPECT_EQ(made->is_discarded(), change.discards) << change.name;
    ::munmap(memory, 16 * kPage);
  }
}

TEST_F(MemoryWatchTest, NotesThatTheHeapShrinks) {
  constexpr std::intptr_t kPages = 64;
  const auto size = kPages * static_cast<std::intptr_t>(kPage);
  auto* memory = static_cast<std::byte*>(::sbrk(size + static_cast<std::intptr_t>(kPage)));
  memory += kPage - reinterpret_cast<std::uintptr_t>(memory) % kPage;
  const auto made = watch(memory, kPages);
  ASSERT_TRUE(made);
  ASSERT_GE(static_cast<std::byte*>(::sbrk(0)), memory + size);
  ASSERT_LT(static_cast<std::byte*>(::sbrk(0)), memory + size + kPage) << "the allocator has taken more meanwhile";
  EXPECT_TRUE(made->is_intact());
  ::sbrk(-size / 2);
  EXPECT_FALSE(made->is_intact());
}

TEST_F(MemoryWatchTest, OnlyPrivateAnonymousMemoryIsWatched) {
  char path[] = "/tmp/bps_watch_XXXXXX";
  const Fd file(::mkstemp(path));
  ::unlink(path);
  const Fd memory_file(::memfd_create("bps", MFD_CLOEXEC));
  for (const int fd : {file.get(), memory_file.get()}) {
    ASSERT_EQ(::ftruncate(fd, static_cast<off_t>(4 * kPage)), 0);
    for (const int flags : {MAP_SHARED, MAP_PRIVATE}) {
      std::byte* memory = map(4, flags, fd);
      memory[kPage] = std::byte{1};
      EXPECT_FALSE(watch(memory, 4)) << fd << " " << flags;
      EXPECT_FALSE(is_private_anonymous({memory, 4 * kPage}));
      ::munmap(memory, 4 * kPage);
    }
  }
  std::byte* shared = map(4, MAP_SHARED | MAP_ANONYMOUS);
  EXPECT_FALSE(watch(shared, 4));
  ::munmap(shared, 4 * kPage);

  std::byte* memory = map(8);
  EXPECT_TRUE(watch(memory, 8));
  EXPECT_TRUE(is_private_anonymous({memory, 8 * kPage}));
  map(1, MAP_SHARED | MAP_FIXED, memory_file.get(), memory + 4 * kPage);
  EXPECT_FALSE(watch(memory, 8));
  EXPECT_TRUE(watch(memory, 4));
  ::munmap(memory + 4 * kPage, kPage);
  EXPECT_FALSE(watch(memory, 8)) << "there is a hole in it";
  EXPECT_FALSE(MemoryWatch::begin({}));
  ::munmap(memory, 8 * kPage);
}

// A page of a heap belongs to two arrays.
TEST_F(MemoryWatchTest, AWatchThatEndsLeavesTheOthers) {
  std::byte* memory = map(8);
  for (int turn = 0; turn < 2; ++turn) {
    auto first = watch(memory, 5);
    auto second = watch(memory + 4 * kPage, 4);
    ASSERT_TRUE(first && second);
    first.reset();
    ::madvise(memory + (4 + static_cast<std::size_t>(turn)) * kPage, kPage, MADV_DONTNEED);
    EXPECT_FALSE(second->is_intact());
  }
  ::munmap(memory, 8 * kPage);
}

// A mapping of which a part is watched cannot be moved as a whole; afterwards it can.
TEST_F(MemoryWatchTest, AMappingIsOneAgainWhenItsWatchesHaveEnded) {
  std::byte* memory = map(8);
  auto made = watch(memory + 2 * kPage, 2);
  ASSERT_TRUE(made);
  made.reset();
  void* moved = ::mremap(memory, 8 * kPage, 4096 * kPage, MREMAP_MAYMOVE);
  ASSERT_NE(moved, MAP_FAILED);
  ::munmap(moved, 4096 * kPage);
}

TEST_F(MemoryWatchTest, AForkedChildHasItsOwn) {
  std::byte* memory = map(4);
  const auto made = watch(memory, 4);
  ASSERT_TRUE(made);
  ChildProcess child([&] {
    memory[0] = std::byte{1};
    ::munmap(memory + kPage, kPage);  // the parent is not asked
    std::byte* own = map(4);
    const auto watched = watch(own, 4);
    if (!watched || !watched->is_intact()) return false;
    ::munmap(own, kPage);
    return !watched->is_intact();
  });
  EXPECT_TRUE(child.ends_well());
  EXPECT_TRUE(made->is_intact());
  EXPECT_EQ(memory[0], std::byte{0});
  ::munmap(memory + 3 * kPage, kPage);
  EXPECT_FALSE(made->is_intact());
  ::munmap(memory, 4 * kPage);
}

// As where the system call is forbidden.
TEST_F(MemoryWatchTest, WithoutTheKernelNothingIsWatched) {
  ChildProcess child([] {
    const rlimit none{.rlim_cur = 0, .rlim_max = 0};  // files that may be opened
    ::setrlimit(RLIMIT_NOFILE, &none);
    std::byte* memory = map(4);
    const MemoryWatch::Obstacle obstacle = MemoryWatch::obstacle();
    return watch(memory, 4) == nullptr && obstacle.what.find("given back") != std::string::npos &&
           !obstacle.hint.empty();
  });
  EXPECT_TRUE(child.ends_well());
}

// ---- Many changes, by many threads

// Random changes of an arena, and watches whose state is known. Several of these at once.
class Arena {
 public:
  explicit Arena(unsigned seed) : random_(seed), first_(map(kPages)) {}
  ~Arena() { ::munmap(first_, kPages * kPage); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // False: a watch is wrong.
  bool step() {
    if (one_of(3) == 0) begin();
    if (!watches_.empty() && one_of(8) == 0)
      watches_.erase(watches_.begin() + static_cast<long>(one_of(watches_.size())));
    if (watches_.size() > 24) watches_.erase(watches_.begin());
    const std::size_t page = one_of(kPages);
    const std::size_t count = 1 + one_of(std::min<std::size_t>(kPages - page, 12));
    const bool changes = change(first_ + page * kPage, count);
    for (Watched& one : watches_) {
      one.is_intact &= !changes || one.page >= page + count || one.page + one.count <= page;
      if (one.watch->is_intact() != one.is_intact) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kPages = 256;
  struct Watched {
    std::size_t page;
    std::size_t count;
    std::unique_ptr<MemoryWatch> watch;
    bool is_intact = true;
  };

  std::size_t one_of(std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); }

  void begin() {
    const std::size_t page = one_of(kPages);
    const std::size_t count = 1 + one_of(std::min<std::size_t>(kPages - page, 12));
    if (auto made = watch(first_ + page * kPage, count)) watches_.push_back({page, count, std::move(made)});
  }

  bool change(std::byte* at, std::size_t count) {
    const std::size_t size = count * kPage;
    switch (one_of(6)) {
      case 0:  // unmap, and map again in another call: meanwhile nobody else may map there
        ::mmap(at, size, PROT_NONE, kPrivate | MAP_FIXED, -1, 0);
        ::mprotect(at, size, PROT_READ | PROT_WRITE);
        return true;
      case 1: map(count, kPrivate | MAP_FIXED, -1, at); return true;
      case 2: ::madvise(at, size, MADV_DONTNEED); return true;
      case 3: {  // other pages are moved here
        std::byte* others = map(count);
        ::mremap(others, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at);
        return true;
      }
      case 4: std::fill_n(at, size, std::byte{1}); return false;
      default: ::mprotect(at, size, PROT_READ | PROT_WRITE); return false;
    }
  }

  std::mt19937 random_;
  std::byte* first_;
  std::vector<Watched> watches_;
};

TEST_F(MemoryWatchTest, MissesNothingInTenThousandChanges) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    Arena arena(seed);
    for (int i = 0; i < 4000; ++i) ASSERT_TRUE(arena.step()) << "seed " << seed << ", step " << i;
  }
}

TEST_F(MemoryWatchTest, MissesNothingWhileOtherThreadsChangeTheAddressSpace) {
  constexpr std::size_t kThreads = 3;
  std::atomic<bool> stop{false};
  std::thread heap([&] {  // its memory is given back by an allocator that holds its lock
    std::vector<std::unique_ptr<std::byte[]>> pieces(64);
    for (unsigned i = 0; !stop; ++i) {
      const std::size_t size = (i * 7919U % 200U + 1) << 10;
      auto& piece = pieces[i % pieces.size()];
      piece = std::make_unique<std::byte[]>(size);
      const auto made = MemoryWatch::begin({piece.get(), size});
      if (i % 100 == 0) ::malloc_trim(0);
    }
  });
  std::array<int, kThreads> wrong{};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&wrong, i] {
      Arena arena(100 + i);
      for (int step = 0; step < 1500; ++step) wrong.at(i) += arena.step() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  heap.join();
  EXPECT_EQ(wrong, (std::array<int, kThreads>{}));
}

// The event of the last change of an address comes when somebody else has memory there already, and watches it.
TEST_F(MemoryWatchTest, ALateEventIsNotTakenForANewOne) {
  std::byte* memory = map(4);
  for (int i = 0; i < 100; ++i) {
    auto before = watch(memory, 4);  // else its end is no event
    ASSERT_TRUE(before);
    std::thread unmapping([&] { ::munmap(memory, 4 * kPage); });
    void* mapped = MAP_FAILED;
    while (mapped == MAP_FAILED) {
      mapped = ::mmap(memory, 4 * kPage, PROT_READ | PROT_WRITE, kPrivate | 0x100000 /* MAP_FIXED_NOREPLACE */, -1, 0);
    }
    ASSERT_EQ(mapped, memory);
    const auto made = watch(memory, 4);
    unmapping.join();
    ASSERT_TRUE(made);
    EXPECT_TRUE(made->is_intact());
    EXPECT_FALSE(before->is_intact());
  }
  ::munmap(memory, 4 * kPage);
}

}  // namespace
}  // namespace bps
