// SPDX-License-Identifier: Apache-2.0
#include "model_failover.h"

#include <array>
#include <map>
#include <optional>
#include <string_view>

#include "core/codec.h"
#include "simulation.h"
#include "tensor/control_messages.h"

namespace bps::sim {
namespace {

using std::chrono::milliseconds;

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint32_t kServers = 2;
constexpr std::uint32_t kSteps = 2;
constexpr std::uint32_t kTensor = 1;          // as View numbers it
constexpr std::uint32_t kFirstRepeat = 1000;  // tensors by which partitions are summed again
constexpr std::uint64_t kPartition = 4096;

// The numbers of failover.pml.
enum class What : std::uint32_t {
  kBegins = 1,
  kPushes,
  kTakesPush,
  kHearsAnswer,
  kTakesLanded,
  kHearsCommitted,
  kDies,
  kEndsView,
  kServes,
  kCompletes,
};

Shape draw(Random& random) {
  Shape made;
  made.servers = kServers;
  made.failover = true;
  made.steps = kSteps;
  made.open_calls = 1;
  made.tensors = {{.elements = 2 * kPartition / 4}};
  made.partition_bytes = kPartition;
  made.window = 1 + static_cast<std::uint32_t>(random.below(3));
  made.conditions.delay = random.between(std::chrono::microseconds(10), milliseconds(1));
  made.conditions.jitter = random.between(std::chrono::microseconds(10), milliseconds(4));
  made.conditions.window = 1 + random.below(4);
  made.conditions.refuse = random.chance(0.5) ? 0.2 : 0;
  made.conditions.patience = milliseconds(1000);
  made.conditions.by_process = random.chance(0.5);
  return made;
}

class Recorder final : public Tap {
 public:
  std::vector<std::uint32_t> actions;
  bool has_begun() const { return views_[0] > 0 && views_[1] > 0; }
  bool died_early() const { return died_early_; }
  bool is_over() const { return completed_ == kWorkers * kSteps; }
  void on_note(std::string_view what, std::uint64_t a, std::uint64_t b);
  void on_message(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> message) override;
  void on_write(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> header,
                std::uint32_t immediate) override;

 private:
  // Of a worker and a server, as far as they take part.
  void note(What what, std::uint32_t worker, std::uint32_t server = 0, std::uint32_t partition = 0) {
    actions.push_back(16 * static_cast<std::uint32_t>(what) + 4 * worker + 2 * server + partition);
  }
  // The partition whose answer has this immediate; nothing for that of an exchange of reports.
  std::optional<std::uint32_t> partition_of(std::uint32_t worker, std::uint32_t immediate) const {
    const auto found = partition_of_.find({worker, immediate});
    return found == partition_of_.end() ? std::nullopt : found->second;
  }

  std::map<std::pair<std::uint32_t, std::uint32_t>, std::optional<std::uint32_t>> partition_of_;
  std::array<std::uint64_t, kWorkers + kServers> views_{};
  bool died_early_ = false;
  std::uint32_t completed_ = 0;
};

void Recorder::on_note(std::string_view what, std::uint64_t a, std::uint64_t b) {
  const auto process = static_cast<std::uint32_t>(a);
  if (what == "start") {  // of a process by its identity
    note(What::kBegins, process - 1);
  } else if (what == "complete") {
    ++completed_;
    note(What::kCompletes, process - 1);
  } else if (what == "dies") {
    died_early_ = !has_begun();
    note(What::kDies, 0, process - kWorkers);
  } else if (what == "view") {
    if (std::exchange(views_[process], b) == 0) return;
    process < kWorkers ? note(What::kEndsView, process) : note(What::kServes, 0, process - kWorkers);
  }
}

void Recorder::on_message(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> message) {
  if (moment == Moment::kSent) return;
  const bool is_up = from < kWorkers;
  const auto epoch = static_cast<std::uint32_t>(views_[to]);
  const std::optional<tensor::ControlMessage> decoded = tensor::decode(message, epoch);
  if (!decoded) return;  // of another view
  if (const auto* landed = std::get_if<tensor::Landed>(&*decoded); landed != nullptr && is_up) {
    for (const std::uint32_t one : landed->immediates) {
      if (const auto partition = partition_of(from, one)) note(What::kTakesLanded, from, to - kWorkers, *partition);
    }
  } else if (const auto* committed = std::get_if<tensor::Committed>(&*decoded); committed != nullptr && !is_up) {
    for (const std::uint32_t one : committed->immediates) {
      if (const auto partition = partition_of(to, one)) note(What::kHearsCommitted, to, from - kWorkers, *partition);
    }
  }
}

void Recorder::on_write(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> header,
                        std::uint32_t immediate) {
  if (from >= kWorkers) {
    const auto partition = partition_of(to, immediate);
    if (moment == Moment::kTaken && partition) note(What::kHearsAnswer, to, from - kWorkers, *partition);
    return;
  }
  const auto push = codec::decode_front<tensor::PushHeader>(header);
  if (!push) throw Violation("a push has no header");
  const bool counts = push->tensor == kTensor || push->tensor >= kFirstRepeat;
  if (moment == Moment::kSent) {
    partition_of_[{from, push->immediate}] = counts ? std::optional(push->partition) : std::nullopt;
  }
  if (!counts) return;
  note(moment == Moment::kSent ? What::kPushes : What::kTakesPush, from, to - kWorkers, push->partition);
}

}  // namespace

std::vector<std::uint32_t> record_failover(std::uint64_t seed) {
  Random random(seed);
  const Shape shape = draw(random);
  std::vector<Fault> faults;
  if (random.chance(0.9)) {
    Fault fault;
    fault.at = random.between({}, milliseconds(60));
    fault.process = kWorkers + static_cast<std::uint32_t>(random.below(kServers));
    faults.push_back(fault);
  }
  Simulation simulation(random.next(), shape, faults);
  Recorder recorder;
  simulation.network().tap = &recorder;
  simulation.network().trace.when_noted = [&](std::string_view what, std::uint64_t a, std::uint64_t b, std::uint64_t) {
    recorder.on_note(what, a, b);
  };
  const Outcome outcome = simulation.run();
  simulation.network().tap = nullptr;
  simulation.network().trace.when_noted = nullptr;
  // A worker that had left when the view ended is not told that the others have left the next one: its shutdown() ends
  // with the process of the scheduler, which does not end here.
  if (!outcome.violation.empty() && !recorder.is_over()) throw Violation(outcome.violation);
  return recorder.died_early() ? std::vector<std::uint32_t>{} : recorder.actions;
}

}  // namespace bps::sim
