// SPDX-License-Identifier: Apache-2.0
// Tells all threads of the process how the session with the scheduler has ended so far.
//
// A view that has ended may still be followed by the end of the job; any other end is final.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/error.h"

namespace bps::van {

// Returns the error of every call after the end of the view. `why` says who is lost, if that is known.
Error view_ended_error(const std::string& why = "");

class SessionEnd {
 public:
  enum class How : std::uint8_t { kNotYet, kWell, kBadly, kSchedulerLost, kViewEnded };
  struct Loss {
    std::uint32_t node = 0;
    std::string why;  // empty: nobody was lost
  };

  void set(How how, const std::string& why);
  How so_far() const;
  // Returns kNotYet when the deadline passed first.
  How wait(const Deadline& deadline) const;
  // Returns why the view, or the job, has ended.
  std::string why() const;

  // Only the first loss counts.
  void note_loss(std::uint32_t node, const std::string& why);
  Loss first_loss() const;

  // Notes how the scheduler was lost, while this node goes on or looks for another one. An empty text notes that a
  // scheduler is there again.
  void note_scheduler_lost(const std::string& why);
  // Returns how the scheduler was lost, also where that is the end of the session; empty where it was not.
  std::string why_scheduler_lost() const;

  // Returns false where this was known, because the scheduler before this one has told it, too.
  bool note_view_ended(const std::string& why);
  bool view_ended() const { return view_ended_; }
  // Notes that the workers of the view have suspended the job, and how long the next view may take to begin. The number
  // is 0 where they have not.
  void note_patience(std::uint32_t ms) { resume_patience_ms_ = ms; }
  std::uint32_t resume_patience_ms() const { return resume_patience_ms_; }
  // Throws kPeerLost when no next view will follow this one.
  void require_next_view() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  How how_ = How::kNotYet;  // guarded by mutex_, as the next three
  std::string why_;
  std::string why_scheduler_lost_;
  Loss first_loss_;
  std::atomic<bool> view_ended_{false};
  std::atomic<std::uint32_t> resume_patience_ms_{0};
};

}  // namespace bps::van
