// SPDX-License-Identifier: Apache-2.0
#include "core/trace_json.h"

#include <algorithm>
#include <utility>

#include "core/json.h"

namespace bps {
namespace {

// Bounds the partitions under way that are remembered. A job has far fewer; what fails at other places leaves entries
// behind.
constexpr std::size_t kMostOpen = 1 << 17;

template <typename Map>
void bound(Map& open) {
  if (open.size() > kMostOpen) open.erase(open.begin());
}

}  // namespace

TraceJson::TraceJson(TraceProcess process, TraceText& text) : process_(std::move(process)), text_(text) {
  text_.add("{\"traceEvents\":[\n");
  metadata("process_name", 0, json_string(process_.name));
  for (std::uint32_t i = 0; i < process_.rings; ++i) {
    metadata("thread_name", i, "\"bps-loop-" + std::to_string(i) + '"');
  }
  metadata("thread_name", process_.rings, "\"program\"");
}

void TraceJson::end() {
  JsonObject about;
  about.add("version", process_.version).add("process", process_.name).add("host", process_.host);
  about.add("worker_rank", process_.worker_rank).add("server_rank", process_.server_rank);
  about.add("clock", process_.clock).add("dropped", dropped_);
  text_.add("\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":").add(about.end()).add("}\n");
}

void TraceJson::name_tensor(std::uint32_t tensor, std::string_view name) {
  tensors_[tensor] = json_string(name);
}

void TraceJson::name_node(std::uint32_t node, std::string_view name) {
  nodes_[node] = json_string(name);
}

void TraceJson::name_span(std::uint32_t number, std::string_view name) {
  spans_[number] = json_string(name);
}

void TraceJson::metadata(const char* what, std::uint32_t ring, std::string_view name) {
  event();
  text_.add("{\"ph\":\"M\",\"name\":\"").add(what).add("\",\"pid\":").add(process_.pid).add(",\"tid\":").add(ring);
  text_.add(",\"args\":{\"name\":").add(name).add("}}");
}

void TraceJson::add(std::uint32_t ring, const TraceEvent& event) {
  const TraceKey key = event.key();
  if (event.stage == TraceStage::kOperation) return write_operation(ring, event);
  if (event.stage >= TraceStage::kPushed) return add_on_server(ring, event);
  const OpenKey open{key.group, key.tensor, key.round, key.partition, key.for_host, event.peer};
  OnWorker* const times = find_on_worker(open, event.stage);
  if (times == nullptr) return;  // its beginning was dropped
  switch (event.stage) {
    case TraceStage::kQueued: times->queued = event.time; return;
    case TraceStage::kOnDevice: times->on_device = event.time; return;
    case TraceStage::kReached: times->reached = event.time; return;
    case TraceStage::kFetched: times->fetched = event.time; return;
    case TraceStage::kStalled:
      if (times->stalled == 0) times->stalled = event.time;
      return;
    case TraceStage::kSent:
      times->sent = event.time;
      times->bytes = event.value;
      return;
    case TraceStage::kAnswered: times->answered = event.time; return;
    case TraceStage::kLanded:
      if (times->sent != 0) write_worker(ring, event, *times);
      break;
    default: break;
  }
  on_worker_.erase(open);
}

// Finds the times of a partition, which begin anew where the stage is the first one.
TraceJson::OnWorker* TraceJson::find_on_worker(const OpenKey& open, TraceStage stage) {
  const auto found = on_worker_.find(open);
  OnWorker* const times = found == on_worker_.end() ? nullptr : &found->second;
  const bool is_after_device = times != nullptr && times->on_device != 0 && times->queued == 0;
  const bool is_after_queue = times != nullptr && times->queued != 0 && times->on_device == 0;
  const bool begins =
      (stage == TraceStage::kQueued && !is_after_device) || (stage == TraceStage::kOnDevice && !is_after_queue);
  if (!begins) return times;
  bound(on_worker_);
  return &(on_worker_[open] = {});
}

void TraceJson::add_on_server(std::uint32_t ring, const TraceEvent& event) {
  const TraceKey key = event.key();
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

void TraceJson::write_worker(std::uint32_t ring, const TraceEvent& landed, const OnWorker& times) {
  const std::string& name = name_of(landed.tensor, landed.partition);
  const auto node = nodes_.find(landed.peer);
  begin(ring, "partition", name, times.fetched == 0 && times.on_device != 0 ? times.on_device : times.queued);
  add_key(landed);
  text_.add(",\"server\":")
      .add(node == nodes_.end() ? "\"?\"" : node->second)
      .add(",\"bytes\":")
      .add(times.bytes)
      .add("}}");
  const std::uint64_t ready = write_wait_for_device(ring, times);
  const std::uint64_t waits = times.stalled == 0 ? times.sent : std::min(std::max(times.stalled, ready), times.sent);
  stage(ring, "partition", times.fetched == 0 ? "\"queued\"" : "\"copied\"", ready, waits);
  if (times.stalled != 0) stage(ring, "partition", "\"credit wait\"", waits, times.sent);
  stage(ring, "partition", "\"sent\"", times.sent, times.answered == 0 ? landed.time : times.answered);
  if (times.answered != 0) stage(ring, "partition", "\"copy to GPU\"", times.answered, landed.time);
  end(ring, "partition", name, landed.time);
}

// Returns when the partition could be sent, as far as its GPU is concerned.
std::uint64_t TraceJson::write_wait_for_device(std::uint32_t ring, const OnWorker& times) {
  if (times.on_device == 0) return times.queued;
  if (times.fetched == 0) {
    stage(ring, "partition", "\"waits for GPU\"", times.on_device, times.queued);
    return times.queued;
  }
  stage(ring, "partition", "\"queued\"", times.queued, times.on_device);
  if (times.reached != 0) stage(ring, "partition", "\"waits for GPU\"", times.on_device, times.reached);
  const std::uint64_t begins = times.reached == 0 ? times.on_device : times.reached;
  stage(ring, "partition", "\"copy from GPU\"", begins, times.fetched);
  return times.fetched;
}

void TraceJson::write_server(std::uint32_t ring, const TraceEvent& replied, const OnServer& times) {
  const std::string& name = name_of(replied.tensor, replied.partition);
  begin(ring, "round", name, times.first);
  add_key(replied);
  text_.add(",\"first_rank\":").add(times.first_rank).add(",\"last_rank\":").add(times.last_rank);
  text_.add(",\"bytes\":").add(times.bytes).add("}}");
  stage(ring, "round", "\"waits for ranks\"", times.first, times.last);
  stage(ring, "round", "\"sum\"", times.last, times.summed);
  stage(ring, "round", "\"answer\"", times.summed, replied.time);
  end(ring, "round", name, replied.time);
}

void TraceJson::write_operation(std::uint32_t ring, const TraceEvent& done) {
  const std::string& name = name_of(done.tensor);
  begin(ring, "operation", name, done.time - std::min(done.time, done.value));
  text_.add("\"tensor\":").add(done.tensor).add(",\"group\":").add(done.group).add(",\"round\":").add(done.round);
  text_.add("}}");
  end(ring, "operation", name, done.time);
}

bool TraceJson::add(const TraceSpan& span) {
  const auto name = spans_.find(span.name);
  if (name == spans_.end()) return false;
  begin(rings(), "program", name->second, span.begin);
  text_.add("\"step\":").add(span.step).add("}}");
  end(rings(), "program", name->second, std::max(span.begin, span.end));
  return true;
}

void TraceJson::add_key(const TraceEvent& of) {
  text_.add("\"tensor\":").add(of.tensor).add(",\"group\":").add(of.group).add(",\"round\":").add(of.round);
  text_.add(",\"partition\":").add(of.partition).add(",\"for_host\":").add(of.for_host != 0 ? "true" : "false");
}

// Returns the name as JSON. Servers do not know names.
const std::string& TraceJson::name_of(std::uint32_t tensor, std::optional<std::uint32_t> partition) {
  const auto known = tensors_.find(tensor);
  if (!partition && known != tensors_.end()) return known->second;
  name_ = known == tensors_.end() ? "\"tensor " + std::to_string(tensor) + '"' : known->second;
  if (partition) {
    name_.pop_back();
    name_ += " [";
    name_ += std::to_string(*partition);
    name_ += "]\"";
  }
  return name_;
}

void TraceJson::begin(std::uint32_t ring, const char* category, std::string_view name, std::uint64_t time) {
  ++next_;
  head("b", ring, category, name, time);
  text_.add(",\"args\":{");
}

void TraceJson::end(std::uint32_t ring, const char* category, std::string_view name, std::uint64_t time) {
  head("e", ring, category, name, time);
  text_.add("}");
}

void TraceJson::head(const char* phase, std::uint32_t ring, const char* category, std::string_view name,
                     std::uint64_t time) {
  event();
  text_.add("{\"ph\":\"").add(phase).add("\",\"cat\":\"").add(category).add("\",\"name\":").add(name);
  text_.add(",\"id2\":{\"local\":\"").add(next_).add("\"},\"pid\":").add(process_.pid).add(",\"tid\":").add(ring);
  text_.add(",\"ts\":").add_microseconds(time);
}

void TraceJson::stage(std::uint32_t ring, const char* category, std::string_view name, std::uint64_t from,
                      std::uint64_t to) {
  --next_;  // a stage belongs to the event around it
  begin(ring, category, name, from);
  text_.add("}}");
  end(ring, category, name, std::max(from, to));
}

// Separates the event that begins from the one before.
void TraceJson::event() {
  if (any_) text_.add(",\n");
  any_ = true;
}

}  // namespace bps
