// SPDX-License-Identifier: Apache-2.0
// Tries again in the background what has failed, after a time that doubles with each failure.
//
// Any thread may call add() and stop(). Tasks run one at a time on a thread of this object, which exists once something
// is to be tried.
#pragma once

#include <array>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "core/clock.h"

namespace bps::node {

class Retries {
 public:
  // Names what is tried. Its failures are counted together.
  using Key = std::array<std::size_t, 3>;
  // Returns true when it has worked, or is not to be tried again.
  using Task = std::function<bool()>;

  Retries() = default;
  ~Retries() { stop(); }
  Retries(const Retries&) = delete;
  Retries& operator=(const Retries&) = delete;

  void add(const Key& key, Task task);
  // Waits for the task that runs. Nothing runs after the return.
  void stop();

 private:
  struct Entry {
    Task task;           // empty when it has worked
    bool again = false;  // it was asked for while it ran, and may have failed after it had worked
    double delay_s = 0;
    Clock::time_point due{};  // when it is due, or when it worked
  };
  void run();
  Entry* next();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Entry> entries_;
  const Entry* running_ = nullptr;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace bps::node
