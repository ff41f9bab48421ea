// SPDX-License-Identifier: Apache-2.0
// Says how a tensor's bytes are compressed, as its declaration has it: "METHOD[:KEY=VALUE[,KEY=VALUE]...]".
//
// Beside the method's own parameters (codec.h) there are, for all methods,
//   feedback=1     what a round lost is added to the next one (error_feedback.h), on workers and servers
//   momentum=MU    workers send gradient + MU * m where m = MU * m + gradient (Nesterov), also within a host; 0: none
//   everywhere=1   also within a host, where it costs time and saves nothing
//   seed=N         what random methods draw differs from job to job by this; 0 unless given
// All ranks of a group must give the same text. A Compression is immutable.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "compress/codec.h"

namespace bps::compress {

struct Compression {
  std::string text;  // the text as it was given
  std::shared_ptr<const Codec> codec;
  bool feedback = false;
  float momentum = 0;
  bool everywhere = false;
  std::uint64_t seed = 0;
};

// Throws Error (kInvalidArgument), which says what is wrong and what is possible.
std::shared_ptr<const Compression> parse_compression(std::string_view text);

}  // namespace bps::compress
