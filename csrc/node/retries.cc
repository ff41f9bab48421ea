// SPDX-License-Identifier: Apache-2.0
#include "node/retries.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/threads.h"

namespace bps::node {
namespace {

constexpr double kFirst_s = 0.25;
constexpr double kMost_s = 8;
// A thing that fails again sooner than that has not recovered, so it waits twice as long as before.
constexpr auto kStable = std::chrono::seconds(20);

}  // namespace

void Retries::add(const Key& key, Task task) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  Entry& entry = entries_[key];
  if (entry.task) {
    entry.again |= running_ == &entry;
    return;
  }
  const auto now = Clock::now();
  const bool again = entry.delay_s > 0 && now - entry.due < kStable;
  entry.delay_s = again ? std::min(2 * entry.delay_s, kMost_s) : kFirst_s;
  entry.due = now + to_duration(entry.delay_s);
  entry.task = std::move(task);
  if (!thread_.joinable()) thread_ = start_thread([this] { run(); });
  changed_.notify_all();
}

void Retries::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

Retries::Entry* Retries::next() {
  Entry* first = nullptr;
  for (auto& [key, entry] : entries_) {
    if (entry.task && (first == nullptr || entry.due < first->due)) first = &entry;
  }
  return first;
}

void Retries::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    Entry* entry = next();
    if (entry == nullptr) {
      changed_.wait(lock);
      continue;
    }
    if (Clock::now() < entry->due) {
      changed_.wait_until(lock, entry->due);
      continue;
    }
    const Task task = entry->task;  // entries stay where they are
    running_ = entry;
    lock.unlock();
    const bool done = task();
    lock.lock();
    running_ = nullptr;
    const auto now = Clock::now();
    if (done && !std::exchange(entry->again, false)) {
      entry->task = nullptr;
      entry->due = now;
    } else {
      entry->delay_s = std::min(2 * entry->delay_s, kMost_s);
      entry->due = now + to_duration(entry->delay_s);
    }
  }
}

}  // namespace bps::node
