// SPDX-License-Identifier: Apache-2.0
// SIGUSR1 makes a process tell what it waits for, whatever its other threads do.
//
// The handler only wakes a thread of its own, which writes the text to standard error. It is installed once, unless the
// program handles the signal already, and stays; a handler that the program sets later replaces it. A forked child does
// nothing.
//
// Threading: any thread. Errors: without threads or descriptors there is no dump, and a line in the log.
#pragma once

#include <functional>
#include <string>

namespace bps::node {

// While the object lives, SIGUSR1 writes what `text` returns, called on another thread. Of several objects the newest
// one counts. The destructor waits for a call that is under way.
class DumpOnSignal {
 public:
  explicit DumpOnSignal(std::function<std::string()> text);
  ~DumpOnSignal();
  DumpOnSignal(const DumpOnSignal&) = delete;
  DumpOnSignal& operator=(const DumpOnSignal&) = delete;

 private:
  friend struct DumpThread;
  const std::function<std::string()> text_;
};

}  // namespace bps::node
