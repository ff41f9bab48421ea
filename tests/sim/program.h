// SPDX-License-Identifier: Apache-2.0
// What a worker runs, as a training script would: steps of operations on a few tensors, each committed by all ranks.
// When a view ends its step is repeated; where servers may be lost unseen and the workers are the same, what was under
// way goes on instead. And what must hold of it, checked as it goes:
//
// - a result consists of exactly one contribution of each member of its view and round, wherever it is wanted;
// - an input that is no output is as it was; nothing around a result changes (I8);
// - once a call has returned or raised, no byte of its memory changes, up to the end of the simulation (I8);
// - no error comes but those that what happened can cause.
//
// An era is a series of views in which calls go on from one to the next; without failover each view is one. Rounds are
// counted in it. Every rank contributes other bytes to every round of every era (contribution()), so that whatever is
// mixed up shows.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "failover.h"
#include "view.h"

namespace bps::sim {

class Program {
 public:
  enum class State { kResuming, kRunning, kAtEndOfStep, kInterrupted, kThrough, kFailed };

  Program(const Shape& shape, Network& network, std::uint64_t identity);

  void begin(View& view);  // or go on, in the next view
  // Its view has ended, and nothing of it is left: takes the results of what has ended meanwhile.
  void collect();
  // Starts calls, and takes the results of those that have ended. True when it has started any.
  bool turn();
  // When turn() has something to do although nothing arrives.
  Time next_start() const;
  // All ranks have come to the end of the step.
  void commit();
  // A member is lost, and no view follows that this rank is in: its calls raise.
  void lose(const std::string& why);
  void end_shift(const van::EndShift& shift);
  void check_returned() const;

  State state() const { return state_; }
  // Landing slots that were granted in this view, counted before the first call; 0 where calls did not wait for them.
  std::size_t granted() const { return granted_; }
  const std::string& why_failed() const { return why_failed_; }
  // Shifts of weights in the last view, and the partitions that they have moved.
  std::uint32_t shifts() const { return shifts_; }
  std::uint32_t moved() const { return moved_; }
  // Calls that have gone on in another view.
  std::uint32_t resumed() const { return resumed_; }
  // Parts of results that a rank has got from another one.
  std::uint32_t gifts() const { return gifts_; }
  // Steps that were committed, by the era in which they were.
  const std::map<std::uint32_t, std::uint32_t>& committed() const { return committed_; }
  // By era, tensor and round: whether it was complete here, or failed because a deadline had passed.
  using Outcomes = std::map<std::array<std::uint32_t, 3>, bool>;
  const Outcomes& outcomes() const { return outcomes_; }

 private:
  // Memory of a call, with a margin that nobody may touch.
  struct Block {
    static constexpr std::size_t kMargin = 64;
    std::vector<std::byte> bytes;
    std::vector<std::byte> returned;  // as it was when the call ended; empty while it runs
    std::uint64_t identity = 0;       // of the allocation
    void make(std::uint64_t size, std::uint64_t number);
    std::byte* data() { return bytes.data() + kMargin; }
    void note_returned() { returned = bytes; }
    void check_margin() const;
  };
  struct Call {
    std::shared_ptr<worker::Operation> operation;
    // It has the number of its round, and waits for the plans: its thread sleeps, or servers get other weights.
    std::optional<worker::Request> asks;
    Time asks_at{};
    std::uint32_t asks_after = 0;  // shifts, when it got its number
    Block input;
    Block output;  // unused in place
    std::uint32_t round = 0;
    std::uint32_t failures = 0;
    std::uint32_t passes = 0;          // of this step, that are complete
    bool is_suspended = false;         // by the end of a view
    std::deque<std::uint32_t> failed;  // rounds whose deadline has passed, the last ones
  };

  void begin_step();
  void begin_era();
  void start(std::size_t tensor);
  bool ask(std::size_t tensor);
  void launch(Call& call, const std::shared_ptr<worker::Tensor>& tensor, const worker::Request& request,
              std::uint32_t round, std::span<const worker::Begun> only = {},
              std::shared_ptr<const worker::Plans> plans = nullptr);
  void end(std::size_t tensor);
  void complete(std::size_t tensor);
  static std::optional<Error> failure_of(const worker::Operation& operation);
  static void note_returned(Call& call);
  void fail(const std::string& why);
  bool resume();
  void exchange();
  void gather(std::uint32_t number, const char* name, const std::vector<std::byte>& mine);
  void hear();
  void take_gifts();
  std::vector<Report> reports_of(std::size_t tensor) const;
  std::uint64_t size_of(std::size_t tensor, const Decision::Gift& gift) const;
  void go_on();
  void go_on(std::size_t tensor, const Decision& decision);
  void fail_late(std::size_t tensor);
  void refuse(std::size_t tensor, std::uint32_t round);
  void check_result(std::size_t tensor);
  bool has_one_block(std::size_t tensor) const;
  std::uint32_t contribution(std::uint64_t identity, std::size_t tensor, std::uint32_t round,
                             std::uint64_t element) const;

  const Shape& shape_;
  Network& network_;
  const std::uint64_t identity_;
  View* view_ = nullptr;
  std::vector<std::uint64_t> members_;  // identities of the workers, by rank
  std::uint32_t rank_ = 0;
  std::uint32_t era_ = 0;             // its first view
  bool has_raised_ = false;           // a call of the view before, for good
  std::vector<std::uint32_t> first_;  // by tensor: the round that is the first one of this view
  std::vector<std::uint32_t> next_;   // by tensor: the round that comes next
  Call exchange_;                     // of reports, then of what some ranks lack, then of nothing
  enum class Exchange { kReports, kGifts, kEnd } stage_{};
  std::vector<Report> reports_;      // of all ranks in order, of each all tensors
  std::vector<Decision> decisions_;  // by tensor
  std::uint32_t resumed_ = 0;
  std::uint32_t gifts_ = 0;
  std::uint32_t shifts_ = 0;
  std::uint32_t moved_ = 0;
  State state_ = State::kInterrupted;
  std::uint32_t step_ = 0;
  std::vector<Call> calls_;            // by tensor
  std::vector<std::size_t> to_start_;  // in the order of this rank
  std::size_t open_ = 0;
  bool waits_for_grants_ = false;
  std::size_t granted_ = 0;
  Time next_start_ = Time::max();
  std::uint64_t allocations_ = 0;
  std::uint64_t sequence_ = 0;
  std::map<std::uint32_t, std::uint32_t> committed_;
  Outcomes outcomes_;
  std::string why_failed_;
  std::string why_lost_;
};

}  // namespace bps::sim
