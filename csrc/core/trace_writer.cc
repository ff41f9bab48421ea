// SPDX-License-Identifier: Apache-2.0
#include "core/trace_writer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(100);
constexpr int kNiceness = 10;  // it gives way to what it traces; the rings hold what comes meanwhile
// Partitions under way that are remembered, far more than a job has; what fails at other places leaves entries behind.
constexpr std::size_t kMostOpen = 1 << 17;

std::string field(const char* name, const std::string& json, bool first = false) {
  std::string text(first ? "" : ",");
  text += '"';
  text += name;
  text += "\":";
  text += json;
  return text;
}

std::string read_line(const char* file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

// Processes with the same text have the same monotonic clock: one start of one kernel, and one time namespace.
std::string clock_identity() {
  std::array<char, 64> space{};
  const ssize_t size = ::readlink("/proc/self/ns/time", space.data(), space.size() - 1);
  std::string identity = read_line("/proc/sys/kernel/random/boot_id");
  identity += ' ';
  identity += size > 0 ? space.data() : "";
  return identity;
}

template <typename Map>
void bound(Map& open) {
  if (open.size() > kMostOpen) open.erase(open.begin());
}

}  // namespace

TraceWriter::~TraceWriter() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void TraceWriter::name_tensor(std::uint32_t tensor, const std::string& name) {
  const std::lock_guard lock(mutex_);
  names_[tensor] = name;
}

void TraceWriter::record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end) {
  if (step < rounds_.first || step > rounds_.last) return;
  TraceSpan span{.step = step, .begin = begin, .end = end};
  {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = span_numbers_.try_emplace(name, static_cast<std::uint32_t>(span_names_.size()));
    if (is_new) span_names_.push_back(json_string(name));
    span.name = found->second;
  }
  if (!spans_.push(std::move(span))) spans_dropped_.add();
}

void TraceWriter::start(Process process) {
  process_ = std::move(process);
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(process_.file).parent_path(), error);
  file_.open(process_.file, std::ios::trunc);
  if (!file_) {
    log_warning("nothing is traced: cannot write " + process_.file);
    return;
  }
  pid_ = static_cast<std::uint64_t>(::getpid());
  clock_ = clock_identity();
  file_ << "{\"traceEvents\":[\n";
  metadata("process_name", 0, json_string(process_.name));
  for (std::size_t i = 0; i < rings_.size(); ++i) {
    metadata("thread_name", i, "\"bps-loop-" + std::to_string(i) + '"');
  }
  metadata("thread_name", rings_.size(), "\"program\"");
  write_batch();
  thread_ = start_thread([this] { run(); });
}

void TraceWriter::metadata(const char* what, std::size_t ring, std::string_view name) {
  event();
  text_.add("{\"ph\":\"M\",\"name\":\"").add(what).add("\",\"pid\":").add(pid_).add(",\"tid\":").add(ring);
  text_.add(",\"args\":{\"name\":").add(name).add("}}");
}

void TraceWriter::run() {
  name_thread("bps-trace");
  constexpr id_t kThisThread = 0;  // on Linux; others mean the process
  (void)::setpriority(PRIO_PROCESS, kThisThread, kNiceness);
  for (bool stops = false; !stops;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kPeriod, [this] { return stops_; });
      stops = stops_;
    }
    try {
      if (drain() || stops) write_batch();
    } catch (const std::exception& error) {
      log_warning(std::string("the trace ends: ") + error.what());
      return;
    }
  }
}

bool TraceWriter::drain() {
  bool any = false;
  for (TraceSpan span; spans_.pop(span); any = true) write_span(span);
  for (std::size_t i = 0; i < rings_.size(); ++i) {
    for (TraceEvent event; rings_[i].pop(event); any = true) take(i, event);
  }
  return any;
}

void TraceWriter::take(std::size_t ring, const TraceEvent& event) {
  const TraceKey& key = event.key;
  if (event.stage == TraceStage::kOperation) return write_operation(ring, event);
  if (event.stage >= TraceStage::kPushed) return take_on_server(ring, event);
  const OpenKey open{key.group, key.tensor, key.round, key.partition, key.for_host, event.peer};
  if (event.stage == TraceStage::kQueued) {
    bound(on_worker_);
    on_worker_[open] = {.queued = event.time};
    return;
  }
  const auto found = on_worker_.find(open);
  if (found == on_worker_.end()) return;  // its beginning was dropped
  OnWorker& times = found->second;
  switch (event.stage) {
    case TraceStage::kStalled:
      if (times.stalled == 0) times.stalled = event.time;
      return;
    case TraceStage::kSent:
      times.sent = event.time;
      times.bytes = event.value;
      return;
    case TraceStage::kLanded:
      if (times.sent != 0) write_worker(ring, event, times);
      break;
    default: break;
  }
  on_worker_.erase(found);
}

void TraceWriter::take_on_server(std::size_t ring, const TraceEvent& event) {
  const TraceKey& key = event.key;
  const OpenKey open{key.group, key.tensor, key.round, key.partition, key.for_host, 0};
  if (event.stage == TraceStage::kPushed) {
    bound(on_server_);
    const auto [found, is_first] = on_server_.try_emplace(open);
    OnServer& times = found->second;
    if (is_first) {
      times.first = event.time;
      times.first_rank = event.peer;
    }
    times.last = event.time;
    times.last_rank = event.peer;
    times.bytes = event.value;
    return;
  }
  const auto found = on_server_.find(open);
  if (found == on_server_.end()) return;
  if (event.stage == TraceStage::kSummed) {
    found->second.summed = event.time;
    return;
  }
  if (found->second.summed != 0) write_server(ring, event, found->second);
  on_server_.erase(found);
}

void TraceWriter::write_worker(std::size_t ring, const TraceEvent& landed, const OnWorker& times) {
  const TraceKey& key = landed.key;
  const std::string& name = name_of(key.tensor, key.partition);
  begin(ring, "partition", name, times.queued);
  add_key(key);
  text_.add(",\"server\":").add(name_of_node(landed.peer)).add(",\"bytes\":").add(times.bytes).add("}}");
  const std::uint64_t waits = times.stalled == 0 ? times.sent : std::min(times.stalled, times.sent);
  stage(ring, "partition", "\"queued\"", times.queued, waits);
  if (times.stalled != 0) stage(ring, "partition", "\"credit wait\"", waits, times.sent);
  stage(ring, "partition", "\"sent\"", times.sent, landed.time);
  end(ring, "partition", name, landed.time);
}

void TraceWriter::write_server(std::size_t ring, const TraceEvent& replied, const OnServer& times) {
  const TraceKey& key = replied.key;
  const std::string& name = name_of(key.tensor, key.partition);
  begin(ring, "round", name, times.first);
  add_key(key);
  text_.add(",\"first_rank\":").add(times.first_rank).add(",\"last_rank\":").add(times.last_rank);
  text_.add(",\"bytes\":").add(times.bytes).add("}}");
  stage(ring, "round", "\"waits for ranks\"", times.first, times.last);
  stage(ring, "round", "\"sum\"", times.last, times.summed);
  stage(ring, "round", "\"answer\"", times.summed, replied.time);
  end(ring, "round", name, replied.time);
}

void TraceWriter::write_operation(std::size_t ring, const TraceEvent& done) {
  const TraceKey& key = done.key;
  const std::string& name = name_of(key.tensor);
  begin(ring, "operation", name, done.time - std::min(done.time, done.value));
  text_.add("\"tensor\":")
      .add(key.tensor)
      .add(",\"group\":")
      .add(key.group)
      .add(",\"round\":")
      .add(key.round)
      .add("}}");
  end(ring, "operation", name, done.time);
}

void TraceWriter::write_span(const TraceSpan& span) {
  {
    const std::lock_guard lock(mutex_);
    name_ = span_names_[span.name];
  }
  begin(rings_.size(), "program", name_, span.begin);
  text_.add("\"step\":").add(span.step).add("}}");
  end(rings_.size(), "program", name_, std::max(span.begin, span.end));
}

void TraceWriter::add_key(const TraceKey& key) {
  text_.add("\"tensor\":").add(key.tensor).add(",\"group\":").add(key.group).add(",\"round\":").add(key.round);
  text_.add(",\"partition\":").add(key.partition).add(",\"for_host\":").add(key.for_host ? "true" : "false");
}

// As JSON. Servers do not know names; what a worker is told later is looked up again.
const std::string& TraceWriter::name_of(std::uint32_t tensor, std::optional<std::uint32_t> partition) {
  std::string& known = quoted_[tensor];
  if (known.empty()) {
    const std::lock_guard lock(mutex_);
    if (const auto found = names_.find(tensor); found != names_.end()) known = json_string(found->second);
  }
  if (!partition && !known.empty()) return known;
  name_ = known.empty() ? "\"tensor " + std::to_string(tensor) + '"' : known;
  if (partition) {
    name_.pop_back();
    name_ += " [";
    name_ += std::to_string(*partition);
    name_ += "]\"";
  }
  return name_;
}

const std::string& TraceWriter::name_of_node(std::uint32_t node) {
  std::string& known = nodes_[node];
  if (known.empty()) known = json_string(process_.name_of_node ? process_.name_of_node(node) : "");
  return known;
}

void TraceWriter::begin(std::size_t ring, const char* category, std::string_view name, std::uint64_t time) {
  ++next_;
  head("b", ring, category, name, time);
  text_.add(",\"args\":{");
}

void TraceWriter::end(std::size_t ring, const char* category, std::string_view name, std::uint64_t time) {
  head("e", ring, category, name, time);
  text_.add("}");
}

void TraceWriter::head(const char* phase, std::size_t ring, const char* category, std::string_view name,
                       std::uint64_t time) {
  event();
  text_.add("{\"ph\":\"").add(phase).add("\",\"cat\":\"").add(category).add("\",\"name\":").add(name);
  text_.add(",\"id2\":{\"local\":\"").add(next_).add("\"},\"pid\":").add(pid_).add(",\"tid\":").add(ring);
  text_.add(",\"ts\":").add_microseconds(time);
}

void TraceWriter::stage(std::size_t ring, const char* category, std::string_view name, std::uint64_t from,
                        std::uint64_t to) {
  --next_;  // it belongs to the event around it
  begin(ring, category, name, from);
  text_.add("}}");
  end(ring, category, name, std::max(from, to));
}

// One begins.
void TraceWriter::event() {
  if (any_) text_.add(",\n");
  any_ = true;
}

// What ends the file, and the next batch goes over.
std::string TraceWriter::trailer() const {
  std::uint64_t dropped = 0;
  for (const TraceRing& ring : rings_) dropped += ring.dropped();
  dropped += spans_dropped_.get();
  std::string text = "\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":{";
  text += field("version", json_string(BPS_VERSION), true);
  text += field("process", json_string(process_.name));
  text += field("host", json_string(process_.host));
  text += field("worker_rank", std::to_string(process_.worker_rank));
  text += field("server_rank", std::to_string(process_.server_rank));
  text += field("clock", json_string(clock_));
  text += field("dropped", std::to_string(dropped));
  text += "}}\n";
  return text;
}

void TraceWriter::write_batch() {
  file_ << text_.text();
  text_.clear();
  const auto here = file_.tellp();
  file_ << trailer() << std::flush;
  if (!file_) throw Error(ErrorCode::kTransport, "cannot write " + process_.file, "look at the space on that disk");
  file_.seekp(here);
}

}  // namespace bps
