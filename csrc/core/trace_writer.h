// SPDX-License-Identifier: Apache-2.0
// Traces one process, by a ring for each loop and a thread that appends what they hold to a file (trace_file.h).
//
// The thread shares the processors with what it traces, so it copies bytes and does no more. At the end a file in the
// Trace Event Format takes the place of that one (trace_format.h); `bps trace` makes it where a process was killed.
//
// add_ring() comes before the loops start, start() once, and stop() or the destructor when no loop uses its ring any
// more. Any thread may call name_tensor() and record_span(). A file that cannot be written ends the trace, and the log
// says so.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/bytes.h"
#include "core/trace.h"
#include "core/trace_files.h"
#include "core/trace_notes.h"

namespace bps {

class TraceWriter {
 public:
  explicit TraceWriter(TracedRounds rounds, bool by_counter = tick_counter_is_trusted())
      : rounds_(rounds), by_counter_(by_counter) {}
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  TraceRing& add_ring() { return rings_.emplace_back(rounds_, by_counter_); }
  // Nothing is noted of a step that is not traced.
  void record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end);
  void name_tensor(std::uint32_t tensor, const std::string& name) { notes_.name_tensor(tensor, name); }

  struct Process {
    std::string file;  // the file of the end, "comm.json"; its folder is made, and "comm.events" is beside it
    std::string name;  // "worker 0 and server 0"
    std::string host;
    std::int32_t worker_rank = -1;
    std::int32_t server_rank = -1;
    std::vector<std::pair<std::uint32_t, std::string>> nodes = {};  // the names of all that events can name
  };
  void start(Process process);
  // Is called when no loop uses its ring any more. The rest is written without the caller; the destructor waits for it.
  void stop();
  // Stops, and waits until all is written: seconds for millions of events. When the wait is interrupted, the events
  // stay for `bps trace`.
  void finish();

 private:
  void run();
  void drain();
  void append_changes();
  void append_ring(std::uint32_t number, const TraceRing::Noted& noted);
  std::uint64_t dropped();

  const TracedRounds rounds_;
  const bool by_counter_;  // see TraceRing
  const TickSample begin_ = TickSample::take();
  std::deque<TraceRing> rings_;  // a deque: addresses stay
  TraceFiles files_;
  std::vector<TraceRing::Noted> noted_;  // by ring
  Bytes frames_;                         // those to be written
  std::uint64_t said_dropped_ = 0;
  TraceNotes notes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stops_ = false;    // guarded by mutex_
  bool is_over_ = false;  // guarded by mutex_
  std::atomic<bool> gives_up_ = false;
  std::thread thread_;
};

}  // namespace bps
