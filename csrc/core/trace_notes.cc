// SPDX-License-Identifier: Apache-2.0
#include "core/trace_notes.h"

#include <span>

namespace bps {

void TraceNotes::name_tensor(std::uint32_t tensor, const std::string& name) {
  const std::lock_guard lock(mutex_);
  append_frame(names_, TraceFrameKind::kTensorName, tensor, as_bytes(name));
}

void TraceNotes::record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end) {
  const std::lock_guard lock(mutex_);
  if (spans_.size() == kSpans || name.size() > TraceProcess::kMostText) {
    ++dropped_;
    return;
  }
  const auto [found, is_new] = span_numbers_.try_emplace(name, static_cast<std::uint32_t>(span_numbers_.size()));
  if (is_new) append_frame(names_, TraceFrameKind::kSpanName, found->second, as_bytes(name));
  spans_.push_back({.begin = begin, .end = end, .name = found->second, .step = step});
}

void TraceNotes::take(Bytes& frames) {
  taken_.clear();
  {
    const std::lock_guard lock(mutex_);
    frames.insert(frames.end(), names_.begin(), names_.end());
    names_.clear();
    taken_.swap(spans_);
  }
  if (!taken_.empty()) {
    append_frame(frames, TraceFrameKind::kSpans, 0, std::as_bytes(std::span<const TraceSpan>(taken_)));
  }
}

std::uint64_t TraceNotes::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

}  // namespace bps
