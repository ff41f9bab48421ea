// SPDX-License-Identifier: Apache-2.0
// Keeps names and spans that any thread of the caller notes for the trace, until its own thread takes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "core/trace_file.h"

namespace bps {

class TraceNotes {
 public:
  void name_tensor(std::uint32_t tensor, const std::string& name);
  void record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end);
  // Appends what was noted since the last time to frames of the file. Names come before the spans that use them.
  void take(Bytes& frames);
  // Returns how many spans were dropped so far: there was no room, or their name was too long.
  std::uint64_t dropped() const;

 private:
  static constexpr std::size_t kSpans = 1 << 13;  // those of some hundred steps, which is seconds

  mutable std::mutex mutex_;
  Bytes names_;  // frames to be written
  std::map<std::string, std::uint32_t> span_numbers_;
  std::vector<TraceSpan> spans_;
  std::uint64_t dropped_ = 0;
  std::vector<TraceSpan> taken_;  // belongs to the thread that takes
};

}  // namespace bps
