// SPDX-License-Identifier: Apache-2.0
// Keeps the jobs that a pool serves, with one server process for each.
//
//                Begin               ends
//   reserved ----------> running ----------> ended
//      |                    |                  ^
//      | the connection     | End, or more     | ends, by SIGKILL if SIGTERM is not enough
//      | is closed          | memory than its  |
//      v                    v share            |
//     gone                ending --------------+
//
// A server that an earlier pool has left, and this one found at its start, is running. The last few ended jobs are
// kept, for their users to ask why they ended.
//
// It belongs to the pool's thread. It throws Error, for the user who asks.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/state.h"
#include "pool/messages.h"
#include "pool/server_process.h"
#include "pool/share.h"

namespace bps::pool {

enum class JobState : std::uint8_t { kReserved, kRunning, kEnding, kEnded };
constexpr const char* name_of(JobState) {
  return "a job of a pool";
}
constexpr std::array<std::uint16_t, 4> arrows_of(JobState) {
  return {
      arrows_to(JobState::kRunning),
      arrows_to(JobState::kEnding, JobState::kEnded),
      arrows_to(JobState::kEnded),
      arrows_to(),
  };
}
std::string_view to_string(JobState state);

struct Job {
  std::uint64_t lease = 0;
  Assignment assignment;
  State<JobState> state{};
  std::optional<ServerProcess> process{};
  Clock::time_point since = Clock::now();  // when this state began
  std::string why{};                       // why it is ending, or has ended
  bool was_found = false;                  // an earlier pool has started it

  bool is_of(const std::string& user, const std::string& name) const {
    return assignment.user == user && assignment.job == name;
  }
};

class Jobs {
 public:
  // `pool` is its name_of_pool(). `cpus` are those that servers may run on. `metrics` is the port of the pool's
  // metrics; those of servers follow it.
  Jobs(const Limits& limits, std::vector<int> cpus, std::string pool, std::optional<std::uint16_t> metrics);

  // Takes over the servers that run already.
  void find();
  const Job& reserve(const std::string& user, const Reserve& request);
  void begin(const std::string& user, const Begin& request, const std::string& secret);
  // Cancels a reservation. Has no effect on one that has begun.
  void cancel(std::uint64_t lease);
  // Ends a job of this user, or, for an operator, of any user. Returns why it had ended before, if it had.
  std::string end(const std::string& user, const std::string& name, bool is_operator);
  void end_all();
  // Notices ends, and ends what has more than its share. Must be called a few times a second while there are jobs.
  void look();

  bool are_there() const { return !jobs_.empty(); }
  bool are_running() const;
  Use use_by(const std::string& user) const;
  const std::list<Job>& all() const { return jobs_; }
  const std::list<Job>& ended() const { return ended_; }  // the last ones, the latest first
  const Limits& limits() const { return limits_; }
  std::uint64_t started() const { return started_; }

 private:
  std::vector<int> choose_cpus(std::uint32_t count) const;
  std::uint32_t free_seat() const;
  void stop(Job& job, const std::string& why);
  void note_end(std::list<Job>::iterator job, const std::string& how);

  const Limits limits_;
  const std::vector<int> cpus_;
  const std::string pool_;
  const std::optional<std::uint16_t> metrics_;
  std::list<Job> jobs_;
  std::list<Job> ended_;
  std::uint64_t started_ = 0;
};

}  // namespace bps::pool
