// SPDX-License-Identifier: Apache-2.0
// Keeps the number of a job's run in a file. A scheduler that is started in the place of a lost one learns from it
// whose members it may take over. The number is no secret.
//
// Throws kInvalidArgument for a file that cannot be read or written, or that no scheduler has written.
#pragma once

#include <cstdint>
#include <string>

namespace bps::van {

struct KnownRun {
  std::uint64_t run = 0;
  bool has_begun = false;  // another scheduler has begun it, or is about to
};
// Returns the run that the file names. Where there is no file, makes one that names a new run. Several callers at once
// all get the same run.
KnownRun run_from_state(const std::string& path);
// Removes the file, because the job has ended: the next one is another run.
void forget_state(const std::string& path);

}  // namespace bps::van
