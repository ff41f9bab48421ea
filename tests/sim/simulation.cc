// SPDX-License-Identifier: Apache-2.0
#include "simulation.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>

namespace bps::sim {
namespace {

using std::chrono::milliseconds;

constexpr const char* kNames[] = {"is killed", "loses its power", "stops", "is cut off", "loses a connection"};
// In virtual time, beyond the last fault: far more than any deadline inside.
constexpr auto kPatience = std::chrono::seconds(120);
constexpr std::uint64_t kMostEvents = 2'000'000;

}  // namespace

std::string Fault::describe() const {
  const auto ms = [](Duration time) {
    return std::to_string(std::chrono::duration_cast<std::chrono::microseconds>(time).count() / 1000) + " ms";
  };
  if (kind == Kind::kScheduler)
    return "at " + ms(at) + " the scheduler is killed, and started again after " + ms(length);
  std::string text =
      "at " + ms(at) + " process " + std::to_string(process) + " " + kNames[static_cast<std::size_t>(kind)];
  if (kind == Kind::kCut) text += " from process " + std::to_string(other);
  return length > Duration::zero() ? text + " for " + ms(length) : text;
}

Simulation::Simulation(std::uint64_t seed, bool prints, std::uint64_t keep)
    : trace_(events_, prints),
      random_(seed),
      shape_(Shape::draw(random_)),
      network_(events_, random_, trace_, shape_.conditions),
      scheduler_(network_, shape_.workers, shape_.servers, shape_.least, shape_.silence) {
  make_processes();
  draw_faults(keep);
}

Simulation::Simulation(std::uint64_t seed, const Shape& shape, const std::vector<Fault>& faults)
    : trace_(events_, false),
      random_(seed),
      shape_(shape),
      network_(events_, random_, trace_, shape_.conditions),
      scheduler_(network_, shape_.workers, shape_.servers, shape_.least, shape_.silence) {
  make_processes();
  for (const Fault& fault : faults) add(fault);
}

void Simulation::make_processes() {
  network_.place(shape_.host_of);
  network_.fence = [this](Machine machine) { end_process(machine); };
  for (std::uint32_t i = 0; i < shape_.processes(); ++i) {
    processes_.push_back(std::make_unique<Process>(shape_, network_, scheduler_, i));
  }
}

void Simulation::add(const Fault& fault) {
  faults_.push_back(fault);
  last_fault_ = std::max(last_fault_, events_.now() + fault.at + fault.length);
}

void Simulation::draw_faults(std::uint64_t keep) {
  Random random(random_.next());  // of its own: a fault that is left out changes no other
  for (std::uint32_t i = 0; i < shape_.faults + shape_.scheduler_deaths; ++i) {
    Fault fault;
    fault.kind = i < shape_.faults ? static_cast<Fault::Kind>(random.below(5)) : Fault::Kind::kScheduler;
    fault.at = random.between(Duration::zero(), milliseconds(60));
    const bool is_short = random.chance(0.5);
    const Duration length = random.between(milliseconds(1), is_short ? milliseconds(100) : milliseconds(10000));
    const bool lasts = fault.kind == Fault::Kind::kPause || fault.kind == Fault::Kind::kCut;
    if (lasts || fault.kind == Fault::Kind::kScheduler) fault.length = length;
    fault.process = static_cast<std::uint32_t>(random.below(shape_.processes()));
    fault.other = static_cast<std::uint32_t>(random.below(shape_.processes()));
    if (shape_.failover && random.chance(0.7)) {  // servers rather than workers
      fault.process = shape_.workers + static_cast<std::uint32_t>(random.below(shape_.servers));
    }
    if ((keep >> i & 1) != 0) add(fault);
  }
}

std::string Simulation::describe() const {
  std::string text = std::to_string(shape_.workers) + " workers, " + std::to_string(shape_.servers) +
                     (shape_.dedicated ? " servers, " : " of them servers, ") +
                     (shape_.failover ? "with failover, " : "") +
                     (shape_.host_of.empty() ? ""
                      : shape_.host_sums     ? "with sums on hosts, "
                                             : "on hosts, ") +
                     std::to_string(shape_.tensors.size()) + " tensors, " + std::to_string(shape_.steps) + " steps, " +
                     (shape_.shifts.empty() ? "" : std::to_string(shape_.shifts.size()) + " shifts, ") +
                     "partitions of " + std::to_string(shape_.partition_bytes) + " bytes";
  text += network_.conditions.by_process ? ", as over TCP" : ", as over RDMA";
  for (const Fault& fault : faults_) text += "\n  " + fault.describe();
  return text;
}

// While the job runs. A process that has not been told yet that the job has begun fails when it loses the scheduler.
void Simulation::lose_scheduler(const Fault& fault) {
  const auto may_outlive = [](const auto& one) { return one->is_at_end() || one->has_been_welcomed(); };
  if (!scheduler_.is_up() || scheduler_.is_over() || !std::ranges::all_of(processes_, may_outlive)) return;
  trace_.note("fault", static_cast<std::uint64_t>(fault.kind));
  scheduler_.die();
  events_.after(fault.length, [this] { scheduler_.start(); });
}

void Simulation::happen(const Fault& fault) {
  if (fault.kind == Fault::Kind::kScheduler) return lose_scheduler(fault);
  Process& process = *processes_[fault.process];
  if (process.is_at_end()) return;
  const bool ends_it = fault.kind == Fault::Kind::kKill || fault.kind == Fault::Kind::kPowerLoss;
  if (ends_it && scheduler_.job().phase() == van::Job::Phase::kGathering) never_began_ = true;
  trace_.note("fault", static_cast<std::uint64_t>(fault.kind), fault.process, fault.other);
  switch (fault.kind) {
    case Fault::Kind::kKill: return process.die(false);
    case Fault::Kind::kPowerLoss: return process.die(true);
    case Fault::Kind::kPause: return network_.pause(fault.process, events_.now() + fault.length);
    case Fault::Kind::kCut:
      if (network_.share_host(fault.process, fault.other)) return;
      return network_.cut(fault.process, fault.other, events_.now() + fault.length);
    case Fault::Kind::kBreak: (void)process.break_connection(); return;
    case Fault::Kind::kScheduler: return;
  }
}

// One that was not stopped within the last second has confirmed, when it was asked, that it writes no more.
void Simulation::end_process(Machine machine) {
  Process& process = *processes_[machine];
  trace_.note("ended", machine);
  const bool was_stopped = network_.runs_from(machine) + milliseconds(1500) > events_.now();
  if (!process.is_at_end() && !was_stopped) {
    ended_for_nothing_ = "process " + std::to_string(machine) + " was ended by another one, and was in good health";
  }
  process.die(false);
}

bool Simulation::is_at_end() const {
  return std::ranges::all_of(processes_, [](const auto& one) { return one->is_at_end(); });
}

void Simulation::run_until_end() {
  for (const auto& process : processes_) {
    events_.after(random_.between({}, milliseconds(1)), [one = process.get()] { one->join(); });
  }
  for (const Fault& fault : faults_) {
    events_.after(fault.at, [this, fault] { happen(fault); });
  }
  for (const ShiftShape& shift : shape_.shifts) {
    events_.after(shift.at, [this, &shift] { scheduler_.shift(shift.links); });
  }
  const Time start = events_.now();
  while (!is_at_end()) {
    if (!events_.run_next()) throw Violation("nothing can happen any more, and the job has not ended");
    if (!ended_for_nothing_.empty()) throw Violation(ended_for_nothing_);
    if (events_.ran() > kMostEvents) throw Violation("so much happens that it cannot end");
    if (events_.now() <= std::max(start, last_fault_) + kPatience) continue;
    std::string states;
    for (const auto& one : processes_) states += " " + std::to_string(static_cast<int>(one->state()));
    throw Violation("the job makes no progress although the network does (states" + states + ")");
  }
  // What was under way when they ended may still land.
  const Time settled = events_.now() + std::chrono::seconds(15);
  while (events_.now() < settled && events_.run_next()) {
  }
}

// Pauses that nobody takes for a death, and a connection or two that break while both ends are in good health: the job
// must go on with everybody.
bool Simulation::is_mild() const {
  return std::ranges::count(faults_, Fault::Kind::kBreak, &Fault::kind) <= (shape_.least == 0 ? 0 : 2) &&
         std::ranges::all_of(faults_, [&](const Fault& fault) {
           return fault.kind == Fault::Kind::kBreak || fault.kind == Fault::Kind::kScheduler ||
                  (fault.kind == Fault::Kind::kPause && fault.length < shape_.silence / 4);
         });
}

// What happens to servers whose loss nobody notices where failover is on, and to no worker; one server at least is in
// good health.
bool Simulation::is_unseen() const {
  std::set<std::uint32_t> servers;
  std::ptrdiff_t breaks = 0;
  for (const Fault& fault : faults_) {
    if (fault.kind == Fault::Kind::kScheduler) continue;
    if (fault.kind == Fault::Kind::kPause && fault.length < shape_.silence / 4) continue;
    const bool is_between = fault.kind == Fault::Kind::kCut;
    if (fault.kind == Fault::Kind::kBreak) {
      ++breaks;
    } else if (!shape_.is_worker(fault.process)) {
      servers.insert(fault.process);
    } else if (!is_between) {
      return false;
    }
    if (is_between && !shape_.is_worker(fault.other)) servers.insert(fault.other);
  }
  return shape_.failover && !never_began_ && breaks <= 2 && servers.size() < shape_.servers;
}

void Simulation::check_end() {
  std::map<std::uint32_t, std::set<std::uint32_t>> committed;
  std::map<std::array<std::uint32_t, 3>, std::set<bool>> outcomes;
  bool any_fault = false;
  for (const auto& process : processes_) {
    any_fault |= process->state() != Process::State::kOver;
    if (!process->is_worker()) continue;
    process->program().check_returned();
    for (const auto& [key, well] : process->program().outcomes()) outcomes[key].insert(well);
    if (process->state() != Process::State::kOver) continue;
    for (const auto& [epoch, steps] : process->program().committed()) committed[epoch].insert(steps);
  }
  for (const auto& [epoch, steps] : committed) {
    if (steps.size() > 1) throw Violation("workers have committed different steps in view " + std::to_string(epoch));
  }
  // A round that failed because a deadline had passed failed for everybody. (The loss of a member may come between.)
  if (scheduler_.views() > 1 || any_fault) outcomes.clear();
  for (const auto& [key, ends] : outcomes) {
    if (ends.size() > 1) throw Violation("a deadline has failed a round on some ranks, and others have its result");
  }
  if (is_unseen()) {
    for (const auto& process : processes_) {
      if (!process->is_worker()) continue;
      if (process->state() != Process::State::kOver) throw Violation("a worker has noticed that a server was lost");
      const auto& steps = process->program().committed();
      if (steps.size() != 1 || steps.begin()->second != shape_.steps) throw Violation("a step was repeated");
    }
  }
  if (any_fault && is_mild()) throw Violation("a process has failed, although nothing has happened that ends one");
  // Connections that break at the very end take credits with them.
  if (any_fault || std::ranges::any_of(faults_, [](const auto& one) { return one.kind != Fault::Kind::kPause; }))
    return;
  std::ptrdiff_t slots = 0;
  for (const auto& process : processes_) {
    process->check_end();
    slots += process->slots_beyond_grants();
  }
  if (slots < 0) throw Violation("a landing slot has been lost");
  if (!faults_.empty()) return;
  if (scheduler_.has_called_off()) throw Violation("a shift was called off, although all workers were there");
  for (const auto& process : processes_) {
    if (!process->is_worker() || process->program().shifts() == scheduler_.shifts()) continue;
    throw Violation("a worker has not heard of all shifts of weights");
  }
}

Outcome Simulation::run() {
  Outcome outcome;
  try {
    run_until_end();
    check_end();
  } catch (const std::exception& violation) {
    outcome.violation = violation.what();
    for (const auto& process : processes_) process->show_open();
  }
  outcome.hash = trace_.hash();
  outcome.events = trace_.length();
  outcome.views = scheduler_.views();
  outcome.shifts = scheduler_.shifts();
  for (const auto& process : processes_) {
    if (!process->is_worker()) continue;
    outcome.resumed += process->program().resumed();
    outcome.gifts += process->program().gifts();
    outcome.moved += process->program().moved();
    std::uint32_t steps = 0;
    for (const auto& [epoch, count] : process->program().committed()) steps += count;
    outcome.steps = std::max(outcome.steps, steps);
  }
  return outcome;
}

}  // namespace bps::sim
