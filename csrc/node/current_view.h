// SPDX-License-Identifier: Apache-2.0
// Holds the view that a process is in, for the van's thread. What that thread tells also reaches a view that is being
// made, and reaches nobody once the view is being taken down.
//
// begin() and end() belong to the owner, and the events to the van's thread. Any thread may call the rest. A holder of
// the lock neither waits for a loop, nor ends a thread, nor destroys what could.
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
  // Both outlive the object. `credentials` are those of the job.
  CurrentView(const ProcessOptions& options, const transport::Credentials& credentials);
  ~CurrentView();
  CurrentView(const CurrentView&) = delete;
  CurrentView& operator=(const CurrentView&) = delete;

  // Returns what the van that set_van() names calls to tell the view.
  van::VanEvents events();
  // Null means that the van is about to end, after the view.
  void set_van(van::Van* van);
  void begin(std::unique_ptr<View> view);
  // Ends the threads of the view, and destroys it.
  void end();

  View* get() const { return view_.get(); }
  worker::Worker* worker() const;
  bool has_ended() const;
  // Ends what a departed process still does for the others.
  void give_up();
  // Returns the scheduler's number; 0: it is not found yet.
  std::uint64_t incarnation() const { return incarnation_; }

 private:
  // Calls `tell` with the lock, unless there is no view.
  void with_view(auto tell);
  void with_worker(auto tell);
  void report_links();
  std::string find_stuck(Duration silence);

  const ProcessOptions& options_;
  const transport::Credentials& credentials_;
  mutable std::mutex mutex_;
  van::Van* van_ = nullptr;     // guarded by mutex_
  std::unique_ptr<View> view_;  // guarded by mutex_; while there is one, so is the van
  std::size_t beats_ = 0;       // belongs to the van's thread
  std::atomic<std::uint64_t> incarnation_{0};
};

}  // namespace bps::node
