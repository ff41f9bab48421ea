// SPDX-License-Identifier: Apache-2.0
// Keeps the two files of a trace: one gets events while the process runs; the other is made from it.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "core/fd.h"

namespace bps {

class TraceFiles {
 public:
  using Parts = std::array<std::span<const std::byte>, 3>;

  // Makes the folder, and an empty file of events beside `file`. It removes a `file` of an earlier job. Throws
  // kTransport.
  void open(const std::string& file);
  // Throws kTransport.
  void append(Parts parts);
  void remove_events() { remove(events_file_); }
  // Makes the file of the end, and removes the events. Where that fails, or `gives_up` becomes true, they stay for `bps
  // trace`, and a warning says so.
  void format(const std::function<bool()>& gives_up);

 private:
  void remove(const std::string& file);

  std::string file_;
  std::string events_file_;
  Fd folder_;
  Fd events_;
};

}  // namespace bps
