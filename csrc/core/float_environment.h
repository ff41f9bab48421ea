// SPDX-License-Identifier: Apache-2.0
// Makes the processor round as sums need it. Each thread sets that for itself: torch.set_flush_denormal() makes
// subnormal numbers zero, and fesetround() rounds otherwise than to nearest. Sums must not depend on it, but a caller
// that waits makes progress itself, and a new thread begins with what its maker has set.
//
// An object acts on the thread that makes it, while it lives. Where nothing is set it costs a few instructions, and
// writes nothing.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bps {

class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : before_(_mm_getcsr()) {
    if ((before_ & ~kFlags) != kDefault) [[unlikely]]
      _mm_setcsr(kDefault | (before_ & kFlags));
  }
  ~DefaultFloatEnvironment() {
    if ((before_ & ~kFlags) != kDefault) [[unlikely]]
      _mm_setcsr(before_);
  }

 private:
  static constexpr std::uint32_t kFlags = 0x3f;      // flags of what has happened so far, which are no setting
  static constexpr std::uint32_t kDefault = 0x1f80;  // rounds to nearest, keeps subnormal numbers, raises no exceptions
  const std::uint32_t before_;
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_ != 0) [[unlikely]]
      set(0);
  }
  ~DefaultFloatEnvironment() {
    if (before_ != 0) [[unlikely]]
      set(before_);
  }

 private:
  static void set(std::uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
  std::uint64_t before_ = 0;
#else
  DefaultFloatEnvironment() = default;
  ~DefaultFloatEnvironment() = default;

 private:
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
};

}  // namespace bps
