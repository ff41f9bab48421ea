// SPDX-License-Identifier: Apache-2.0
// The view that a process is in, for the van's thread: what that tells reaches the view also while it is being made,
// and nobody once it is being taken down.
//
// Threading: begin() and end() belong to the owner, the events to the van's thread; the rest any thread may call.
// Nobody who has the lock waits for a loop, ends a thread, or destroys what could.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "node/startup.h"
#include "transport/handshake.h"
#include "van/van_events.h"

namespace bps::van {
class Van;
}  // namespace bps::van
namespace bps::worker {
class Worker;
}  // namespace bps::worker

namespace bps::node {

class View;

class CurrentView {
 public:
  // Both outlive the object. `credentials`: of the job.
  CurrentView(const ProcessOptions& options, const transport::Credentials& credentials);
  ~CurrentView();
  CurrentView(const CurrentView&) = delete;
  CurrentView& operator=(const CurrentView&) = delete;

  // The van that set_van() names tells the view this.
  van::VanEvents events();
  // Null: it is about to end, after the view.
  void set_van(van::Van* van);
  void begin(std::unique_ptr<View> view);
  // Ends the threads of the view, and destroys it.
  void end();

  View* get() const { return view_.get(); }
  worker::Worker* worker() const;
  bool has_ended() const;
  // Ends what a departed process does for the others.
  void give_up();
  // The scheduler has this number; 0: it is not found yet.
  std::uint64_t incarnation() const { return incarnation_; }

 private:
  // `tell`: with the lock, unless there is no view.
  void with_view(auto tell);
  void with_worker(auto tell);
  void report_links();
  std::string find_stuck(Duration silence);

  const ProcessOptions& options_;
  const transport::Credentials& credentials_;
  mutable std::mutex mutex_;
  van::Van* van_ = nullptr;     // guarded by mutex_
  std::unique_ptr<View> view_;  // the same; while there is one, so is the van
  std::size_t beats_ = 0;       // of the van's thread
  std::atomic<std::uint64_t> incarnation_{0};
};

}  // namespace bps::node
