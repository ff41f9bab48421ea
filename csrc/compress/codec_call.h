// SPDX-License-Identifier: Apache-2.0
// Marks a call of a codec that is the program's own (Codec::is_built_in() is false). It tells which one this thread
// runs, and how the last one failed.
//
// A loop makes such calls. What they call of this library would wait for a loop that waits for them, so it is refused.
// Nothing tells a call of another thread from one of the program itself, unless the loop makes no progress. Any thread
// may use this; a failure belongs to the calling thread.
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

  // Returns, for a loop that is stuck, a clause about the call that has taken longest, such as ", which runs the codec
  // 'cut',"; "" if there is none.
  static std::string describe_longest();
  // Refuses what other threads call within calls that have taken this long: these may wait for them.
  static void refuse_behind(Duration taken);
  // Is called by a wait of another thread that began at `begun`. Throws Error (kInvalidArgument) if it is refused.
  static void check_behind(Clock::time_point begun);

  // Notes that the call has failed: "encode() of the codec 'cut' raised ValueError: no". The first one counts.
  static void fail(std::string why);
  // These say whether, and how, a call of this thread failed since the last take_failure(); "" if none did.
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
