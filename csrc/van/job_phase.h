// SPDX-License-Identifier: Apache-2.0
// Defines the phases of a job as the scheduler sees it, each with what is valid only in it. docs/notes/members.md has
// the diagram.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "core/clock.h"
#include "core/state.h"
#include "van/rendezvous.h"
#include "van/reunion.h"

namespace bps::van {

// The members join.
struct Gathering {
  Rendezvous rendezvous;
  Clock::time_point alone_since = Clock::now();  // when the last process that waited has gone
};
// A scheduler was lost, and its members come to the one in its place.
struct Reuniting {
  Reunion reunion;
  Clock::time_point until;
};
// A view is in progress.
struct Running {};
// A view has ended, and its members join again, for the next one.
struct Renewing {
  std::string why;
  Rendezvous rendezvous{0, 0};
  std::optional<Refused> give_up{};  // why the next view does not begin; nothing: it may
};
// The workers have left to come back, and the job is resumed when workers do.
struct Suspended {
  bool well = true;  // whether the job has ended well if nobody resumes it
  Rendezvous rendezvous = Rendezvous::of_suspended_job();
  Clock::time_point until{};  // when the job is over if no worker has come
};
struct Over {
  bool well = false;  // every worker left and nobody was lost
};

enum class PhaseName : std::uint8_t { kGathering, kReuniting, kRunning, kRenewing, kSuspended, kOver };
constexpr const char* name_of(PhaseName) {
  return "a job";
}
constexpr std::array<std::uint16_t, 6> arrows_of(PhaseName) {
  return {
      arrows_to(PhaseName::kReuniting, PhaseName::kRunning, PhaseName::kOver),
      arrows_to(PhaseName::kGathering, PhaseName::kRenewing),
      arrows_to(PhaseName::kRenewing, PhaseName::kSuspended, PhaseName::kOver),
      arrows_to(PhaseName::kRunning, PhaseName::kSuspended, PhaseName::kOver),
      arrows_to(PhaseName::kRunning, PhaseName::kOver),
      arrows_to(),
  };
}

class JobPhase {
 public:
  using Name = PhaseName;

  explicit JobPhase(Gathering first) : now_(std::move(first)) {}
  Name name() const { return static_cast<Name>(now_.index()); }
  template <typename Phase>
  void begin(Phase phase) {
    const Name before = name();
    now_ = std::move(phase);
    check_arrow(before, name());
  }
  template <typename Phase>
  bool is() const {
    return std::holds_alternative<Phase>(now_);
  }
  // Returns null in any other phase.
  template <typename Phase>
  Phase* in() {
    return std::get_if<Phase>(&now_);
  }
  template <typename Phase>
  const Phase* in() const {
    return std::get_if<Phase>(&now_);
  }
  // Returns the rendezvous that seats processes which join, or null where this phase has none.
  Rendezvous* rendezvous() {
    if (auto* gathering = in<Gathering>()) return &gathering->rendezvous;
    if (auto* renewing = in<Renewing>()) return &renewing->rendezvous;
    if (auto* suspended = in<Suspended>()) return &suspended->rendezvous;
    return nullptr;
  }
  // Tells people whom the job waits for: "2 of 4 workers joined; missing ranks 1, 3".
  std::string missing() const {
    if (const auto* gathering = in<Gathering>()) return gathering->rendezvous.missing();
    if (const auto* suspended = in<Suspended>()) return suspended->rendezvous.missing();
    if (const auto* reuniting = in<Reuniting>()) return reuniting->reunion.progress();
    return "";
  }
  // Returns why the next view does not begin, or nothing.
  std::optional<Refused> given_up() const {
    const auto* renewing = in<Renewing>();
    return renewing == nullptr ? std::nullopt : renewing->give_up;
  }

 private:
  std::variant<Gathering, Reuniting, Running, Renewing, Suspended, Over> now_;  // in the order of Name
};

}  // namespace bps::van
