// SPDX-License-Identifier: Apache-2.0
// The parts of a scheduler's job share this: what it was told at the start, whom they tell, and what it is now.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "van/calls.h"
#include "van/job_phase.h"
#include "van/member_table.h"
#include "van/origin.h"
#include "van/registry.h"
#include "van/shift.h"
#include "van/terms.h"

namespace bps::van {

struct JobOptions {
  Registry::Options registry;       // with the numbers of workers and servers
  std::uint32_t silence_ms = 1500;  // told to the members
  std::chrono::milliseconds join_timeout{60000};
  bool ends_alone = false;                      // also when it has waited that long without any member
  std::chrono::milliseconds resume_timeout{0};  // for workers to resume a suspended job; 0: none can be suspended
  Terms terms{};    // of the rank that hosts the scheduler, or of the scheduler; min_workers: the job goes on while
                    // there are so many; 0: only as it has begun
  Origin origin{};  // of the rank that hosts the scheduler
  std::uint64_t run = 0;                              // of the job; members of another one cannot rejoin
  std::chrono::milliseconds reunion_patience{12000};  // for members to rejoin, after the first one
};

struct JobEvents {
  Calls::Send send;
  Shift::Tell tell = nullptr;                                           // the same to many; null: by send
  std::function<void(const std::string& why)> on_lost;                  // a member
  std::function<void(const std::string& what)> on_suspended = nullptr;  // and when nobody has resumed it
  std::function<void()> on_over;                                        // before the members learn of it
  std::function<void(Peer)> close = nullptr;               // ends the connection of another peer than the caller
  std::function<void(std::uint32_t epoch)> on_epoch;       // of the view that who connects from here on will be in
  std::function<std::int64_t(Peer)> silence_ms = nullptr;  // since this peer was heard of last
};

struct JobRecord {
  explicit JobRecord(JobOptions made)
      : options(std::move(made)),
        phase(Gathering{
            .rendezvous = {options.registry.workers, options.registry.servers, options.terms, options.origin}}) {}

  const JobOptions options;
  JobPhase phase;
  std::unique_ptr<MemberTable> members = std::make_unique<MemberTable>();  // none before the job runs
  std::uint32_t epoch = 1;                                                 // of this view, or of the one to come

  // True when those who are here can be the next view.
  bool goes_on() const { return options.terms.min_workers != 0 && members->can_go_on(options.terms.min_workers); }
  // True when a member has left to come back. Then the others will have left, too, or be lost: it has the say.
  bool can_be_suspended() const { return options.resume_timeout.count() > 0 && members->has_suspended(); }
};

}  // namespace bps::van
