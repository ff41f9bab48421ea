// SPDX-License-Identifier: Apache-2.0
#include "model_scheduler.h"

#include <array>
#include <string_view>

#include "simulation.h"

namespace bps::sim {
namespace {

using std::chrono::milliseconds;

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint32_t kServers = 2;
constexpr std::uint32_t kSteps = 2;

// The numbers of scheduler.pml.
enum class What : std::uint32_t { kWaits = 1, kHearsDone, kHearsEnd, kIsWelcomed, kRejoins, kDies };

Shape draw(Random& random) {
  Shape made;
  made.servers = kServers;
  made.steps = kSteps;
  made.tensors = {{.elements = 256}};
  made.conditions.delay = random.between(std::chrono::microseconds(10), milliseconds(2));
  made.conditions.jitter = random.between(std::chrono::microseconds(10), milliseconds(8));
  made.conditions.patience = milliseconds(1000);
  made.conditions.by_process = random.chance(0.5);
  return made;
}

class Recorder {
 public:
  std::vector<std::uint32_t> actions;
  bool is_over() const { return committed_[0] == kSteps && committed_[1] == kSteps; }
  void on_note(std::string_view what, std::uint64_t a);

 private:
  void note(What happens, std::uint32_t worker = 0) {
    actions.push_back(16 * static_cast<std::uint32_t>(happens) + worker);
  }
  std::array<bool, kWorkers> has_begun_{};
  std::array<std::uint32_t, kWorkers> committed_{};
};

void Recorder::on_note(std::string_view what, std::uint64_t a) {
  const auto process = static_cast<std::uint32_t>(a);
  if (is_over()) return;
  if (what == "fault" && process == static_cast<std::uint32_t>(Fault::Kind::kScheduler)) return note(What::kDies);
  if (what == "fault" || process >= kWorkers) return;
  if (what == "waits") {
    note(What::kWaits, process);
  } else if (what == "done") {
    ++committed_[process];
    note(What::kHearsDone, process);
  } else if (what == "hears end") {
    note(What::kHearsEnd, process);
  } else if (what == "rejoins") {
    note(What::kRejoins, process);
  } else if (what == "view" && std::exchange(has_begun_[process], true)) {
    note(What::kIsWelcomed, process);
  }
}

}  // namespace

std::vector<std::uint32_t> record_scheduler(std::uint64_t seed) {
  Random random(seed);
  const Shape shape = draw(random);
  std::vector<Fault> faults;
  for (std::uint64_t deaths = random.below(3); deaths > 0; --deaths) {
    faults.push_back({.kind = Fault::Kind::kScheduler,
                      .at = random.between({}, milliseconds(150)),
                      .length = random.between(milliseconds(1), milliseconds(100))});
  }
  if (random.chance(0.5)) {
    faults.push_back({.at = random.between(milliseconds(10), milliseconds(150)), .process = kWorkers});
  }
  Simulation simulation(random.next(), shape, faults);
  Recorder recorder;
  simulation.network().trace.when_noted = [&](std::string_view what, std::uint64_t a, std::uint64_t, std::uint64_t) {
    recorder.on_note(what, a);
  };
  const Outcome outcome = simulation.run();
  simulation.network().trace.when_noted = nullptr;
  // How such a job ends when a view ends while its workers leave is for the simulator's own seeds.
  if (!outcome.violation.empty() && !recorder.is_over()) throw Violation(outcome.violation);
  return recorder.is_over() ? recorder.actions : std::vector<std::uint32_t>{};
}

}  // namespace bps::sim
