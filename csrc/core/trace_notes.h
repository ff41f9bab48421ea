// SPDX-License-Identifier: Apache-2.0
// Names and spans that threads of the caller note for the trace, until its own thread takes them. Threading: any.
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
  // Appends what has been noted since the last time to frames of the file: names before the spans that use them.
  void take(Bytes& frames);
  // How many spans were dropped so far: there was no room, or their name is too long.
  std::uint64_t dropped() const;

 private:
  static constexpr std::size_t kSpans = 1 << 13;  // of some hundred steps, which is seconds

  mutable std::mutex mutex_;
  Bytes names_;  // frames to be written
  std::map<std::string, std::uint32_t> span_numbers_;
  std::vector<TraceSpan> spans_;
  std::uint64_t dropped_ = 0;
  std::vector<TraceSpan> taken_;  // of the thread that takes
};

}  // namespace bps
