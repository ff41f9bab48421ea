// SPDX-License-Identifier: Apache-2.0
// The parts of a scheduler's job share these: its options, the functions by which they tell others, and its state.
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
  std::uint32_t silence_ms = 1500;  // after which a member counts as lost; members are told
  std::chrono::milliseconds join_timeout{60000};
  bool ends_alone = false;                      // the job ends also when it has waited that long without any member
  std::chrono::milliseconds resume_timeout{0};  // for workers to resume a suspended job; 0: none can be suspended
  // These are the terms of the rank that hosts the scheduler, or of the scheduler. The job goes on while there are
  // min_workers workers; where that is 0 it goes on only as it has begun.
  Terms terms{};
  Origin origin{};        // that of the rank that hosts the scheduler
  std::uint64_t run = 0;  // the number of the job's run; members of another run cannot rejoin
  std::chrono::milliseconds reunion_patience{12000};  // for members to rejoin, after the first one
};

struct JobEvents {
  Calls::Send send;
  Shift::Tell tell = nullptr;                                           // sends to many at once; null: `send` does it
  std::function<void(const std::string& why)> on_lost;                  // a member is lost
  std::function<void(const std::string& what)> on_suspended = nullptr;  // suspended, or not resumed in time
  std::function<void()> on_over;                                        // comes before the members learn of it
  std::function<void(Peer)> close = nullptr;               // ends the connection of another peer than the caller
  std::function<void(std::uint32_t epoch)> on_epoch;       // those who connect from now on will be in this view
  std::function<std::int64_t(Peer)> silence_ms = nullptr;  // for how long nothing was heard of this peer
};

struct JobRecord {
  explicit JobRecord(JobOptions made)
      : options(std::move(made)),
        phase(Gathering{
            .rendezvous = {options.registry.workers, options.registry.servers, options.terms, options.origin}}) {}

  const JobOptions options;
  JobPhase phase;
  std::unique_ptr<MemberTable> members = std::make_unique<MemberTable>();  // empty before the job runs
  std::uint32_t epoch = 1;  // the number of this view, or of the one to come

  // Returns true when the members that are here can be the next view.
  bool goes_on() const { return options.terms.min_workers != 0 && members->can_go_on(options.terms.min_workers); }
  // Returns true when a member has left to come back. One such member decides for all: in the end the others leave,
  // too, or are lost.
  bool can_be_suspended() const { return options.resume_timeout.count() > 0 && members->has_suspended(); }
};

}  // namespace bps::van
