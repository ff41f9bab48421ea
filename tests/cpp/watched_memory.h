// SPDX-License-Identifier: Apache-2.0
// Tells tests that watch memory whether they can.
#pragma once

#include <string>

#include "core/memory_watch.h"

#if defined(__SANITIZE_THREAD__)
#define BPS_THREAD_CHECKER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BPS_THREAD_CHECKER 1
#endif
#endif

namespace bps {

// Returns why memory is not watched here, or "" where it is. The monitor is a thread that stays, and the thread checker
// ends a child that starts threads if its parent had any: other tests of this process need such children.
inline std::string why_memory_is_not_watched() {
#ifdef BPS_THREAD_CHECKER
  return "the thread checker would end the children of later tests";
#else
  const MemoryWatch::Obstacle obstacle = MemoryWatch::obstacle();
  return obstacle.what.empty() ? "" : obstacle.what + ": " + obstacle.hint;
#endif
}

}  // namespace bps
