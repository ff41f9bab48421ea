// SPDX-License-Identifier: Apache-2.0
#include "core/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>

namespace bps {
namespace {

// Uses no memory from the heap, on which a child of a process with threads may not rely.
template <typename T>
struct List {
  std::array<T, 16> items{};
  std::atomic<std::size_t> size{0};

  void add(T item) {
    const std::size_t index = size.load();
    items.at(index) = item;  // throws when there are more than anybody has thought of
    size.store(index + 1);
  }
};

constexpr std::size_t kMostDescriptors = 1 << 20;  // the kernel's own limit, unless an administrator has raised it
constexpr std::size_t kWordBits = 64;

constinit std::atomic<std::uint32_t> g_forks{0};
constinit std::mutex g_lists_mutex;
constinit List<std::mutex*> g_mutexes;
constinit List<void (*)()> g_actions;
constinit std::array<std::atomic<std::uint64_t>, kMostDescriptors / kWordBits> g_descriptors;
constinit std::atomic<std::size_t> g_words{0};  // how many of these were ever used

void lock_all() {
  g_lists_mutex.lock();
  for (std::size_t i = 0; i < g_mutexes.size; ++i) g_mutexes.items[i]->lock();
}

void unlock_all() {
  for (std::size_t i = g_mutexes.size; i > 0; --i) g_mutexes.items[i - 1]->unlock();
  g_lists_mutex.unlock();
}

void close_descriptors() {
  for (std::size_t word = 0; word < g_words; ++word) {
    for (std::uint64_t bits = g_descriptors[word].exchange(0); bits != 0; bits &= bits - 1) {
      ::close(static_cast<int>(word * kWordBits + static_cast<std::size_t>(std::countr_zero(bits))));
    }
  }
}

void in_child() {
  g_forks.fetch_add(1);
  for (std::size_t i = 0; i < g_actions.size; ++i) g_actions.items[i]();
  close_descriptors();
  unlock_all();
}

[[maybe_unused]] const int g_installed = ::pthread_atfork(lock_all, unlock_all, in_child);

std::uint64_t bit_of(int fd) {
  return 1ULL << (static_cast<std::size_t>(fd) % kWordBits);
}

}  // namespace

std::uint32_t fork_count() {
  return g_forks.load(std::memory_order_relaxed);
}

void hold_across_fork(std::mutex& mutex) {
  const std::lock_guard lock(g_lists_mutex);
  g_mutexes.add(&mutex);
}

void after_fork_in_child(void (*action)()) {
  const std::lock_guard lock(g_lists_mutex);
  g_actions.add(action);
}

void close_in_children(int fd) {
  const std::size_t word = static_cast<std::size_t>(fd) / kWordBits;
  if (fd < 0 || word >= g_descriptors.size()) return;
  g_descriptors[word].fetch_or(bit_of(fd));
  for (std::size_t used = g_words; used <= word && !g_words.compare_exchange_weak(used, word + 1);) {
  }
}

void keep_in_children(int fd) {
  const std::size_t word = static_cast<std::size_t>(fd) / kWordBits;
  if (fd >= 0 && word < g_descriptors.size()) g_descriptors[word].fetch_and(~bit_of(fd));
}

}  // namespace bps
