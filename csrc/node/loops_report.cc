// SPDX-License-Identifier: Apache-2.0
// Collects the counts of all loops, and their answers to what they are doing.
#include <algorithm>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "node/loops.h"

namespace bps::node {
namespace {

// Returns nothing from a loop that hangs, or has ended.
template <typename T>
std::optional<T> answer_of(std::future<T>& answer, const Deadline& deadline) {
  if (answer.wait_until(deadline.at()) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const std::future_error&) {
    return std::nullopt;
  }
}

// Calls look(loop, answer) on each loop. An answer that does not come in time has the loop's name and no more.
template <typename Answer, typename Look>
std::vector<Answer> ask_all(const std::vector<std::unique_ptr<Loop>>& loops, const Deadline& deadline, Look look) {
  std::vector<std::future<Answer>> answers;
  for (const auto& loop : loops) {
    answers.push_back(loop->reactor->ask([&loop = *loop, look] {
      Answer answer{.loop = loop.reactor->name(), .answered = true};
      look(loop, answer);
      return answer;
    }));
  }
  std::vector<Answer> all;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    all.push_back(answer_of(answers[i], deadline).value_or(Answer{.loop = loops[i]->reactor->name()}));
  }
  return all;
}

}  // namespace

std::vector<Loops::OpenState> Loops::open_state(std::size_t most, const Deadline& deadline) const {
  return ask_all<OpenState>(loops_, deadline, [most](const Loop& loop, OpenState& state) {
    if (loop.worker_loop) {
      state.partitions = loop.worker_loop->list_open(most);
      state.worker = loop.worker_loop->usage();
    }
    if (!loop.server_loop) return;
    state.rounds = loop.server_loop->open_rounds();
    state.listed = loop.server_loop->list_open(most);
    state.last_failed_round = loop.server_loop->last_failure();
  });
}

std::vector<server::RoundRecorder::Record> Loops::recent_rounds(std::size_t most) const {
  std::vector<server::RoundRecorder::Record> all;
  for (const auto& loop : loops_) {
    const server::RoundRecorder* recorder = loop->recorder;
    if (recorder == nullptr) continue;
    const auto some = recorder->list();
    all.insert(all.end(), some.begin(), some.end());
  }
  std::ranges::stable_sort(all, {}, &server::RoundRecorder::Record::ended);
  if (all.size() > most) all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(most));
  return all;
}

void Loops::ask_link_use(std::function<void(const van::LinkUse&)> told) const {
  struct Answer {
    std::mutex mutex;
    std::map<std::uint32_t, van::LinkUse::Peer> peers;
    std::size_t left = 0;
  };
  const auto answer = std::make_shared<Answer>();
  answer->left = loops_.size();
  for (const auto& loop : loops_) {
    loop->reactor->loop().post([&loop = *loop, answer, told] {
      const std::lock_guard lock(answer->mutex);
      const auto look = [&](std::uint32_t node, transport::DataEndpoint& endpoint) {
        const transport::Carried carried = endpoint.take_carried();
        if (carried.bytes == 0) return;
        van::LinkUse::Peer& peer = answer->peers[node];
        peer.node = node;
        peer.bytes += carried.bytes;
        peer.busy_us = std::max(peer.busy_us, carried.busy_us);
      };
      if (loop.worker_loop) loop.worker_loop->for_each_connection(look);
      if (loop.server_loop) loop.server_loop->for_each_connection(look);
      if (--answer->left > 0) return;
      van::LinkUse use;
      for (const auto& [node, peer] : answer->peers) use.peers.push_back(peer);
      told(use);
    });
  }
}

std::vector<std::pair<std::string, std::uint64_t>> Loops::counters() const {
  std::vector<std::pair<std::string, std::uint64_t>> sum = Counters().list();
  for (const auto& loop : loops_) {
    const auto one = loop->reactor->counters().list();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i].second += one[i].second;
  }
  return sum;
}

MetricFamily Loops::operation_times() const {
  MetricFamily family{MetricFamily::Type::kHistogram, "bps_operation_duration_seconds",
                      "Time from the start to the end of complete operations; counted where BPS_METRICS_PORT is set."};
  std::uint64_t count = 0;
  std::uint64_t sum_ns = 0;
  for (std::size_t i = 0; i <= DurationHistogram::kBounds; ++i) {
    for (const auto& loop : loops_) count += loop->reactor->counters().operation_times.count(i);
    const bool last = i == DurationHistogram::kBounds;
    family.samples.push_back(
        {"_bucket", {{"le", last ? "+Inf" : to_text(DurationHistogram::bound_s(i))}}, static_cast<double>(count)});
  }
  for (const auto& loop : loops_) sum_ns += loop->reactor->counters().operation_times.sum_ns();
  family.samples.push_back({"_sum", {}, static_cast<double>(sum_ns) * 1e-9});
  family.samples.push_back({"_count", {}, static_cast<double>(count)});
  return family;
}

std::vector<Loops::Usage> Loops::usage(const Deadline& deadline) const {
  return ask_all<Usage>(loops_, deadline, [](const Loop& loop, Usage& usage) {
    if (loop.worker_loop) usage.worker = loop.worker_loop->usage();
    if (!loop.server_loop) return;
    usage.slot_bytes = loop.server_loop->slot_bytes();
    usage.open_rounds = loop.server_loop->open_rounds();
    usage.oldest_round_s = loop.server_loop->oldest_round_s();
  });
}

}  // namespace bps::node
