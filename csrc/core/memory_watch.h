// SPDX-License-Identifier: Apache-2.0
// Ranges of this process's address space, and whether the process still has the pages there that it had.
//
// A NIC that has registered memory goes on using its pages after the process has given them back, by munmap, mremap,
// madvise or brk, and has other pages at the same addresses. Nothing in the process sees all of these calls: an
// allocator makes them. The kernel does, and tells of them by a userfaultfd: each range of a MemoryWatch is registered
// with the one of this process, and a thread, the monitor, reads its events. Only those are asked for, and no page
// faults: the registration is for faults by write protection, which nobody ever sets. So no access to watched memory
// waits for the monitor, neither by this process nor by the kernel on its behalf.
//
// Only private anonymous memory can be watched: of a mapped file others can take pages away, by the file, and no event
// tells. Neither does MADV_GUARD_INSTALL (Linux 6.13), after which the memory cannot be used.
//
// The order of things. A thread that gives memory back returns from the kernel when the monitor has read the event. The
// monitor makes its sequence number odd before it reads, notes the event at the watches, and makes the number even. So
// who looks after that thread has returned finds either an odd number, and waits, or what has happened. Unmapping and
// moving precede their event; discarding (madvise) follows it, at an unknown time: who registers the memory at once may
// get pages that are about to go. Hence is_discarded().
//
// An event may be late: the memory that it tells of belongs to somebody else by then, who begins to watch it. begin()
// therefore returns when no event is under way, so that each event that a watch notes is of a later change.
//
// No deadlock: a thread that gives memory back may hold any lock (the GIL, an allocator's, one of this library) and
// waits for the monitor. The monitor takes one lock, that of the list of watches, and neither allocates nor frees
// memory. Who holds that lock does neither, either, and makes no call but ioctl() on the userfaultfd, which waits for
// the kernel's lock of the address space; nobody who waits for the monitor holds that one. Who waits for an even number
// waits for the monitor alone. The monitor never ends, so that also the end of the process frees memory as ever.
//
// A child of fork() is not told of, and not watched: its watches are the parent's, and are neither used nor destroyed
// there. fork() itself waits for nothing here. Memory that was registered stays the parent's (Linux 5.12; before, the
// verbs library withholds it from the child).
//
// Threading: any; a watch has one owner. Set-up, but for is_intact(), which costs two loads. Nothing here throws but
// for want of memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/fork.h"

namespace bps {

class MemoryWatch {
 public:
  // From now on, until the watch is destroyed, it notes when pages of `bytes` are given back. Null where that cannot be
  // known: memory other than private anonymous one, or a system without userfaultfd.
  static std::unique_ptr<MemoryWatch> begin(std::span<const std::byte> bytes);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  // True when all pages are those of begin().
  bool is_intact() const;
  // Pages were discarded by madvise(): perhaps they are about to go.
  bool is_discarded() const;

  // Changes whenever some watch may have noted something.
  static std::uint32_t changes();

  // An obstacle says why no memory is watched here, and what to do about it; empty: there is none.
  struct Obstacle {
    std::string what;
    std::string hint;
  };
  static Obstacle obstacle();

 private:
  friend class AddressMonitor;
  enum class State : std::uint8_t { kIntact, kGone, kDiscarded };

  MemoryWatch(class AddressMonitor& monitor, std::uintptr_t first, std::uintptr_t last)
      : monitor_(monitor), first_(first), last_(last) {}

  AddressMonitor& monitor_;
  const std::uintptr_t first_;  // whole pages: [first_, last_)
  const std::uintptr_t last_;
  std::atomic<State> state_{State::kIntact};
  bool listed_ = false;
  MemoryWatch* before_ = nullptr;  // on the monitor's list
  MemoryWatch* after_ = nullptr;
  const std::uint32_t forks_ = fork_count();
};

}  // namespace bps
