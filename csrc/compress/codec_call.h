// SPDX-License-Identifier: Apache-2.0
// A call of a codec that is the program's own (Codec::is_built_in() is false): which one this thread runs, and how the
// last one failed.
//
// A loop makes such calls. So what they call of this library would wait for a loop that waits for them: it is refused.
// Nothing tells a call of another thread from one of the program itself, unless the loop makes no progress.
// Threading: any thread; a failure is the calling thread's own.
#pragma once

#include <string>

#include "core/clock.h"

namespace bps::compress {

class CodecCall {
 public:
  explicit CodecCall(const std::string& codec);
  ~CodecCall();
  CodecCall(const CodecCall&) = delete;
  CodecCall& operator=(const CodecCall&) = delete;

  // Throws Error (kInvalidArgument) within such a call.
  static void refuse_within();

  // For a loop that is stuck: a clause such as ", which runs the codec 'cut'," of the call that has taken longest; ""
  // if there is none.
  static std::string describe_longest();
  // Refuses what other threads have called, or will, within calls that have taken so long now: these may wait for them.
  static void refuse_behind(Duration taken);
  // For a wait of another thread that has begun then: throws Error (kInvalidArgument) if it is refused.
  static void check_behind(Clock::time_point begun);

  // The call has failed: a clause such as "encode() of the codec 'cut' raised ValueError: no". The first one counts.
  static void fail(std::string why);
  // Return whether, and how, a call of this thread has failed since the last take_failure(); "" if none has.
  static bool has_failed();
  static std::string take_failure();

 private:
  const std::string& codec_;
  CodecCall* const outer_;
  const Clock::time_point begun_ = Clock::now();
  bool refuses_others_ = false;
  static thread_local CodecCall* t_innermost;
};

inline constexpr const char* kMendCodec = "mend the codec: both functions must take all that the other one returns";

}  // namespace bps::compress
