// SPDX-License-Identifier: Apache-2.0
// Watches ranges of this process's address space, and tells whether the process still has the same pages there.
//
// A NIC that has registered memory goes on using its pages after the process has given them back, by munmap, mremap,
// madvise or brk, and has other pages at the same addresses. Nothing in the process sees all of these calls: an
// allocator makes them. The kernel does, and tells of them by a userfaultfd. Each range of a MemoryWatch is registered
// with the one of this process, and a thread, the monitor, reads its events. Only these events are asked for, and no
// page faults: the registration is for faults by write protection, which nobody ever sets. So no access to watched
// memory waits for the monitor, neither by this process nor by the kernel on its behalf.
//
// Only private anonymous memory can be watched. Others can take pages of a mapped file away, by the file, and no event
// tells. Neither does one for MADV_GUARD_INSTALL (Linux 6.13), after which the memory cannot be used.
//
// The order is as follows. A thread that gives memory back returns from the kernel when the monitor has read the event.
// The monitor makes its sequence number odd before it reads, notes the event at the watches, and makes the number even.
// So a look after that thread has returned finds either an odd number, and waits, or what has happened. Unmapping and
// moving precede their event. Discarding (madvise) follows it, at an unknown time: memory that is registered at once
// may get pages that are about to go. Hence is_discarded().
//
// An event may be late: the memory that it tells of then belongs to somebody else, who begins to watch it. begin()
// therefore returns when no event is under way, so that each event that a watch notes is of a later change.
//
// There is no deadlock. A thread that gives memory back may hold any lock (the GIL, an allocator's, one of this
// library) and waits for the monitor. The monitor takes one lock, that of the list of watches, and neither allocates
// nor frees memory. Its holder does neither, either, and makes no call but ioctl() on the userfaultfd, which waits for
// the kernel's lock of the address space. No thread that waits for the monitor holds it. A thread that waits for an
// even number waits for the monitor alone. The monitor never ends, so memory can be freed to the end of the process.
//
// A child of fork() is not watched: its watches are the parent's, and are neither used nor destroyed there. fork()
// itself waits for nothing here. Memory that was registered stays the parent's (Linux 5.12; before, the verbs library
// withholds it from the child).
//
// Any thread may call these; a watch has one owner. They are for set-up, except is_intact(), which costs two loads.
// They throw only for want of memory.
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
  // Notes, until the watch is destroyed, when pages of `bytes` are given back. Returns null where that cannot be known:
  // for memory that is not private and anonymous, or on a system without userfaultfd.
  static std::unique_ptr<MemoryWatch> begin(std::span<const std::byte> bytes);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  // Returns true when all pages are those of begin().
  bool is_intact() const;
  // Returns true when pages were discarded by madvise(), and are perhaps about to go.
  bool is_discarded() const;

  // Returns a number that changes whenever some watch may have noted something.
  static std::uint32_t changes();

  // Says why no memory is watched here, and what to do about it; both are empty when it is.
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
  const std::uintptr_t first_;  // whole pages are watched: [first_, last_)
  const std::uintptr_t last_;
  std::atomic<State> state_{State::kIntact};
  bool listed_ = false;
  MemoryWatch* before_ = nullptr;  // the one before on the monitor's list
  MemoryWatch* after_ = nullptr;
  const std::uint32_t forks_ = fork_count();
};

}  // namespace bps
