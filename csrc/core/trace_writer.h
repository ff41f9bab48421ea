// SPDX-License-Identifier: Apache-2.0
// The trace of one process: a ring for each loop, and a thread that writes what they hold to a file in the Trace Event
// Format, which chrome://tracing and Perfetto open.
//
// Each partition is one nestable asynchronous event with its stages inside. The file is complete after each batch of
// events, however the process ends. Times are those of the monotonic clock, in microseconds.
//
// Threading: add_ring() before the loops start, start() once, name_tensor() from any thread. The destructor writes what
// is left; no loop may use its ring any more by then. Errors: a file that cannot be written ends the trace, with a line
// in the log.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/trace.h"
#include "core/trace_text.h"

namespace bps {

class TraceWriter {
 public:
  explicit TraceWriter(TracedRounds rounds) : rounds_(rounds) {}
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  TraceRing& add_ring() { return rings_.emplace_back(rounds_); }
  // From any thread; of a step that is not traced nothing is noted.
  void record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end);
  void name_tensor(std::uint32_t tensor, const std::string& name);

  struct Process {
    std::string file;  // its folder is made
    std::string name;  // "worker 0 and server 0"
    std::string host;
    std::int32_t worker_rank = -1;
    std::int32_t server_rank = -1;
    std::function<std::string(std::uint32_t node)> name_of_node = nullptr;
  };
  void start(Process process);

 private:
  static constexpr std::size_t kSpans = 1 << 13;  // of some hundred steps, which is seconds
  using OpenKey = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, bool, std::uint32_t>;
  struct OnWorker {
    std::uint64_t queued = 0;
    std::uint64_t stalled = 0;
    std::uint64_t sent = 0;
    std::uint64_t bytes = 0;
  };
  struct OnServer {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    std::uint64_t summed = 0;
    std::uint32_t first_rank = 0;
    std::uint32_t last_rank = 0;
    std::uint64_t bytes = 0;
  };

  void run();
  bool drain();
  void take(std::size_t ring, const TraceEvent& event);
  void take_on_server(std::size_t ring, const TraceEvent& event);
  void write_worker(std::size_t ring, const TraceEvent& landed, const OnWorker& times);
  void write_server(std::size_t ring, const TraceEvent& replied, const OnServer& times);
  void write_span(const TraceSpan& span);
  void write_operation(std::size_t ring, const TraceEvent& done);
  void metadata(const char* what, std::size_t ring, std::string_view name);
  void begin(std::size_t ring, const char* category, std::string_view name, std::uint64_t time);
  void end(std::size_t ring, const char* category, std::string_view name, std::uint64_t time);
  void head(const char* phase, std::size_t ring, const char* category, std::string_view name, std::uint64_t time);
  void stage(std::size_t ring, const char* category, std::string_view name, std::uint64_t from, std::uint64_t to);
  void event();
  void add_key(const TraceKey& key);
  const std::string& name_of(std::uint32_t tensor, std::optional<std::uint32_t> partition = {});
  const std::string& name_of_node(std::uint32_t node);
  void write_batch();
  std::string trailer() const;

  const TracedRounds rounds_;
  std::deque<TraceRing> rings_;  // a deque: addresses stay
  Process process_;
  std::ofstream file_;
  TraceText text_;  // of the batch
  std::uint64_t pid_ = 0;
  std::string clock_;
  std::unordered_map<std::uint32_t, std::string> quoted_;  // names of tensors, as JSON
  std::unordered_map<std::uint32_t, std::string> nodes_;   // and of nodes
  std::string name_;                                       // of the event that is written
  bool any_ = false;                                       // events are in the file
  std::uint64_t next_ = 0;                                 // identity of an asynchronous event within this process
  std::map<OpenKey, OnWorker> on_worker_;
  std::map<OpenKey, OnServer> on_server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint32_t, std::string> names_;         // guarded by mutex_
  std::map<std::string, std::uint32_t> span_numbers_;  // guarded by mutex_
  std::vector<std::string> span_names_;                // guarded by mutex_; as JSON
  MpscRing<TraceSpan> spans_{kSpans};
  Counter spans_dropped_;
  bool stops_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace bps
