// SPDX-License-Identifier: Apache-2.0
// Writes the text of a trace, in the Trace Event Format, from names and events in the order in which they come. Each
// partition is one nestable asynchronous event with its stages inside. An event without beginning or end is left out.
// Times are those of the monotonic clock, in microseconds.
//
// It belongs to one thread and throws nothing. Its memory is bounded, whatever the events say.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "core/trace.h"
#include "core/trace_file.h"
#include "core/trace_text.h"

namespace bps {

class TraceJson {
 public:
  // Adds to `text`, which may be taken and cleared between any two calls.
  TraceJson(TraceProcess process, TraceText& text);

  std::uint32_t rings() const { return process_.rings; }
  void name_tensor(std::uint32_t tensor, std::string_view name);
  void name_node(std::uint32_t node, std::string_view name);
  void name_span(std::uint32_t number, std::string_view name);
  void note_dropped(std::uint64_t events) { dropped_ = events; }
  void add(std::uint32_t ring, const TraceEvent& event);
  bool add(const TraceSpan& span);  // returns false for a span that has no name
  void end();

 private:
  using OpenKey = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, bool, std::uint32_t>;
  using Names = std::unordered_map<std::uint32_t, std::string>;  // names as JSON
  struct OnWorker {
    std::uint64_t queued = 0;
    std::uint64_t on_device = 0;  // before `queued` where an RDMA device reads the GPU's memory itself
    std::uint64_t reached = 0;
    std::uint64_t fetched = 0;
    std::uint64_t stalled = 0;
    std::uint64_t sent = 0;
    std::uint64_t answered = 0;
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

  OnWorker* find_on_worker(const OpenKey& open, TraceStage stage);
  void add_on_server(std::uint32_t ring, const TraceEvent& event);
  void write_worker(std::uint32_t ring, const TraceEvent& landed, const OnWorker& times);
  std::uint64_t write_wait_for_device(std::uint32_t ring, const OnWorker& times);
  void write_server(std::uint32_t ring, const TraceEvent& replied, const OnServer& times);
  void write_operation(std::uint32_t ring, const TraceEvent& done);
  void metadata(const char* what, std::uint32_t ring, std::string_view name);
  void begin(std::uint32_t ring, const char* category, std::string_view name, std::uint64_t time);
  void end(std::uint32_t ring, const char* category, std::string_view name, std::uint64_t time);
  void head(const char* phase, std::uint32_t ring, const char* category, std::string_view name, std::uint64_t time);
  void stage(std::uint32_t ring, const char* category, std::string_view name, std::uint64_t from, std::uint64_t to);
  void event();
  void add_key(const TraceEvent& of);
  const std::string& name_of(std::uint32_t tensor, std::optional<std::uint32_t> partition = {});

  const TraceProcess process_;
  TraceText& text_;
  Names tensors_;
  Names nodes_;
  Names spans_;
  std::string name_;        // the name of the event that is written
  bool any_ = false;        // events have been written
  std::uint64_t next_ = 0;  // the identity of the next asynchronous event within this process
  std::uint64_t dropped_ = 0;
  std::map<OpenKey, OnWorker> on_worker_;
  std::map<OpenKey, OnServer> on_server_;
};

}  // namespace bps
