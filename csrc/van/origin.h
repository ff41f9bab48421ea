// SPDX-License-Identifier: Apache-2.0
// Tells the ranks of two jobs apart that have the same name because nobody gave them one. Ranks of one job run the same
// program with the same arguments, but for their own numbers.
#pragma once

#include <cstddef>
#include <string>

namespace bps::van {

inline constexpr std::size_t kMostOriginBytes = 4096;

struct Origin {
  // Holds the script and its arguments, cut where a number begins or ends, with kCut between. Each piece begins with
  // '=', or with '#' if it is a number of this process: its rank, local rank or machine. The text is empty where the
  // command is not known, or does not matter because the job has a name of its own.
  std::string command;
  static constexpr char kCut = '\x1f';

  static constexpr void fields(auto& io, auto& m) { io.bounded(m.command, kMostOriginBytes); }
  bool operator==(const Origin&) const = default;
};

// Returns true when both may be ranks of one job.
bool may_belong_together(const Origin& a, const Origin& b);
// Returns the command as it was typed.
std::string command_of(const Origin& origin);

}  // namespace bps::van
