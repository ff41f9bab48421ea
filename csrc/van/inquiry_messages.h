// SPDX-License-Identifier: Apache-2.0
// Defines the messages that tell people what the members of a job are doing. A process asks the scheduler, which asks
// each member and passes on what they reply. The process need not be a member, but has to know the job's secret.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bps::van {

inline constexpr std::size_t kMostReportBytes = 1U << 20;  // the report of one member

struct Ask {  // -> scheduler; the reply is Asked, and then a Told of each member that replies
  std::uint32_t call = 0;
  bool stacks = false;  // reports also say where the threads of Python programs are
  static constexpr void fields(auto& io, auto& m) { io(m.call, m.stacks); }
  bool operator==(const Ask&) const = default;
};
struct Asked {
  std::uint32_t call = 0;
  std::uint32_t members = 0;  // how many members have been asked
  std::string state;          // the state of the scheduler, as JSON
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.members);
    io.bounded(m.state, kMostReportBytes);
  }
  bool operator==(const Asked&) const = default;
};
struct Question {  // scheduler -> member; the reply is Reply
  std::uint64_t number = 0;
  bool stacks = false;
  static constexpr void fields(auto& io, auto& m) { io(m.number, m.stacks); }
  bool operator==(const Question&) const = default;
};
struct Reply {
  std::uint64_t number = 0;
  std::string report;  // the report of the member, as JSON
  static constexpr void fields(auto& io, auto& m) {
    io(m.number);
    io.bounded(m.report, kMostReportBytes);
  }
  bool operator==(const Reply&) const = default;
};
struct Told {  // scheduler -> the process that asked
  std::uint32_t call = 0;
  std::uint32_t node = 0;
  std::string report;
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.node);
    io.bounded(m.report, kMostReportBytes);
  }
  bool operator==(const Told&) const = default;
};

}  // namespace bps::van
