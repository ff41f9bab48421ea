// SPDX-License-Identifier: Apache-2.0
// SIGUSR1 makes a process tell what it waits for, whatever its other threads do.
//
// The handler only wakes a thread, which writes the text to standard error. It is installed once, unless the program
// handles the signal already, and stays, without effect while nobody wants it; a handler that the program sets later
// replaces it. In a forked child it has no effect.
//
// Threading: any thread. Errors: without threads or descriptors there is no text, and a line in the log.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "core/fd.h"

namespace bps::node {

// While the object lives, SIGUSR1 writes what `text` returns, called on a thread of its own. Of several objects the
// newest one counts. The destructor waits for a call that is under way.
class DumpOnSignal {
 public:
  explicit DumpOnSignal(std::function<std::string()> text);
  ~DumpOnSignal();
  DumpOnSignal(const DumpOnSignal&) = delete;
  DumpOnSignal& operator=(const DumpOnSignal&) = delete;

 private:
  void run();

  const std::function<std::string()> text_;
  Fd event_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace bps::node
