// SPDX-License-Identifier: Apache-2.0
#include "server/worker_paths.h"

#include <algorithm>

namespace bps::server {
namespace {

// Lost paths that come back have another number. The worker may open one before it has noticed the loss.
constexpr std::size_t kMostPaths = std::size_t{2} * transport::kMostRails;

}  // namespace

std::span<const Answer> AnswerStream::confirm(std::uint32_t count) {
  const std::uint32_t more = count - confirmed_;
  if (more > answers_.size() - first_) return {};
  if (first_ > 0 && first_ >= answers_.size() / 2) {  // comes before the span is handed out
    answers_.erase(answers_.begin(), answers_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }
  const auto found = std::span(answers_).subspan(first_, more);
  confirmed_ = count;
  first_ += more;
  return found;
}

void AnswerStream::give_up() {
  for (const Answer& answer : unconfirmed()) answer.give_up();
  answers_.clear();
  first_ = 0;
}

bool WorkerPaths::may_add(const transport::Hello& hello) const {
  if (!paths_.empty() && fails_over_ != (hello.path != 0)) return false;
  if (std::ranges::find(refused_, hello.path) != refused_.end()) return false;
  const auto path = std::ranges::find(paths_, hello.path, &WorkerPath::id);
  if (path == paths_.end()) return paths_.size() < kMostPaths;
  if (path->broken) return false;
  if (hello.plane != transport::Plane::kData) return path->control == nullptr;
  if (path->streams.size() >= most_streams_) return false;
  return hello.path == 0 || std::ranges::none_of(path->streams, [&](const AnswerStream& stream) {
           return stream.data->hello.stream == hello.stream;
         });
}

WorkerPath& WorkerPaths::path_of(const transport::Hello& hello) {
  fails_over_ |= hello.path != 0;
  if (WorkerPath* known = find(hello.path)) return *known;
  return paths_.emplace_back(WorkerPath{.id = hello.path});
}

void WorkerPaths::add(transport::ControlEndpoint* endpoint) {
  path_of(endpoint->hello).control = endpoint;
  control_.add(endpoint);
}

void WorkerPaths::add(transport::DataEndpoint* endpoint) {
  auto& streams = path_of(endpoint->hello).streams;
  const auto before = std::ranges::find_if(
      streams, [&](const AnswerStream& one) { return one.data->hello.stream > endpoint->hello.stream; });
  streams.insert(before, AnswerStream(endpoint));
}

WorkerPath* WorkerPaths::find(std::uint16_t id) {
  const auto found = std::ranges::find(paths_, id, &WorkerPath::id);
  return found == paths_.end() ? nullptr : &*found;
}

bool WorkerPaths::has_other_than(std::uint16_t id) const {
  return std::ranges::any_of(paths_, [&](const WorkerPath& path) { return path.id != id && is_usable(path); });
}

bool WorkerPaths::is_usable(const WorkerPath& path) {
  return !path.broken && path.control != nullptr && !path.control->is_lost() &&
         std::ranges::any_of(path.streams, [](const AnswerStream& stream) { return !stream.data->is_lost(); });
}

std::vector<WorkerPath*> WorkerPaths::find_silent() {
  const auto is_silent = [](const WorkerPath& path) {
    return (path.control != nullptr && path.control->is_silent()) ||
           std::ranges::any_of(path.streams, [](const AnswerStream& stream) { return stream.data->is_silent(); });
  };
  std::vector<WorkerPath*> silent;
  bool others = false;
  for (WorkerPath& path : paths_) {
    if (path.broken) continue;
    if (is_silent(path)) {
      silent.push_back(&path);
    } else {
      others |= is_usable(path);
    }
  }
  if (!others) silent.clear();
  return silent;
}

transport::DataEndpoint* WorkerPaths::any_data() const {
  for (const WorkerPath& path : paths_) {
    if (!path.streams.empty()) return path.streams.front().data;
  }
  return nullptr;
}

bool WorkerPaths::is_flushed() const {
  return std::ranges::all_of(paths_, [](const WorkerPath& path) {
    return (path.control == nullptr || path.control->is_flushed()) &&
           std::ranges::all_of(path.streams, [](const AnswerStream& stream) { return stream.data->is_flushed(); });
  });
}

void WorkerPaths::keep(const Answer& answer) {
  for (WorkerPath& path : paths_) {
    const auto found = std::ranges::find(path.streams, answer.data, &AnswerStream::data);
    if (found != path.streams.end()) return found->keep(answer);
  }
}

void WorkerPaths::lead(const WorkerPath& lost, transport::DataEndpoint*& data, std::uint64_t& key) {
  const auto is_offered = [&](std::uint16_t id) {
    return std::ranges::find(lost.keys, id, &tensor::AnswerKeys::by) != lost.keys.end();
  };
  std::vector<transport::DataEndpoint*> offered;
  std::vector<transport::DataEndpoint*> others;  // the worker had not completed these when it wrote: better than none
  for (const WorkerPath& path : paths_) {
    for (const AnswerStream& stream : path.streams) {
      if (!stream.data->is_lost()) (is_offered(path.id) ? offered : others).push_back(stream.data);
    }
  }
  const auto& living = offered.empty() ? others : offered;
  if (living.empty()) return;
  data = living[turn_++ % living.size()];
  for (const tensor::AnswerKeys& keys : lost.keys) {
    if (keys.by != data->hello.path) continue;
    const auto found = std::ranges::lower_bound(keys.keys, key, {}, &tensor::AnswerKeys::Key::lost);
    if (found == keys.keys.end() || found->lost != key) continue;
    key = found->other;
    return;
  }
}

void WorkerPaths::close(WorkerPath& path) {
  path.broken = true;
  for (const AnswerStream& stream : path.streams) stream.data->abandon();
  if (path.control == nullptr) return;
  path.control->abandon();
  control_.remove(path.control);
}

void WorkerPaths::abandon(bool keep_control) {
  lost_ = true;
  for (const WorkerPath& path : paths_) {
    for (const AnswerStream& stream : path.streams) stream.data->abandon();
    if (path.control != nullptr && !keep_control) path.control->abandon();
  }
}

void WorkerPaths::forget(std::uint16_t id) {
  std::erase_if(paths_, [&](const WorkerPath& path) { return path.id == id; });
  if (refused_.size() == kMostRefused) refused_.erase(refused_.begin());
  refused_.push_back(id);
}

}  // namespace bps::server
