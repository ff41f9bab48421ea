// SPDX-License-Identifier: Apache-2.0
// The run of a job, in a file: a scheduler that is started in the place of a lost one learns by it whose members it may
// take over. It is no secret.
//
// Errors: kInvalidArgument for a file that cannot be read or written, or that is something else.
#pragma once

#include <cstdint>
#include <string>

namespace bps::van {

struct KnownRun {
  std::uint64_t run = 0;
  bool has_begun = false;  // under another scheduler
};
// The run of which the file tells; where there is none, a new run, of which it tells from now on. Of several callers at
// once all get the same.
KnownRun run_from_state(const std::string& path);
// The job has ended: the next one is another run.
void forget_state(const std::string& path);

}  // namespace bps::van
