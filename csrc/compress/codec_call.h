// SPDX-License-Identifier: Apache-2.0
// A call of a codec that is the program's own (Codec::is_built_in() is false): which one this thread runs, and how the
// last one failed.
//
// A loop makes such calls. So what they call of this library would wait for a loop that waits for them: it is refused.
// Threading: everything here is the calling thread's own.
#pragma once

#include <string>

namespace bps::compress {

class CodecCall {
 public:
  explicit CodecCall(const std::string& codec) : codec_(codec), outer_(t_innermost) { t_innermost = this; }
  ~CodecCall() { t_innermost = outer_; }
  CodecCall(const CodecCall&) = delete;
  CodecCall& operator=(const CodecCall&) = delete;

  // Throws Error (kInvalidArgument) within such a call.
  static void refuse_within();
  // The call has failed: a clause such as "encode() of the codec 'cut' raised ValueError: no". The first one counts.
  static void fail(std::string why);
  // Whether a call of this thread has failed, and how: from the first failure until it is taken; "" if none has.
  static bool has_failed();
  static std::string take_failure();

 private:
  const std::string& codec_;
  CodecCall* const outer_;
  static thread_local CodecCall* t_innermost;
};

inline constexpr const char* kMendCodec = "mend the codec: both functions must take all that the other one returns";

}  // namespace bps::compress
