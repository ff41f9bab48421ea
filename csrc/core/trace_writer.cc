// SPDX-License-Identifier: Apache-2.0
#include "core/trace_writer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <exception>
#include <fstream>
#include <span>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(100);
constexpr int kNiceness = 10;  // it gives way to what it traces; the rings hold what comes meanwhile

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

}  // namespace

TraceWriter::~TraceWriter() {
  if (!thread_.joinable()) return;
  stop();
  thread_.join();
}

void TraceWriter::stop() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
}

void TraceWriter::finish() {
  if (!thread_.joinable()) return;
  try {
    check_interrupt();  // comes before the thread formats anything, so that all events stay where they are
    stop();
    std::unique_lock lock(mutex_);
    (void)wait_until(lock, changed_, Deadline::never(), [this] { return is_over_; });
  } catch (...) {
    gives_up_ = true;
    stop();
    thread_.join();
    throw;
  }
  thread_.join();
}

void TraceWriter::record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end) {
  if (rounds_.contain(step)) notes_.record_span(name, step, begin, end);
}

void TraceWriter::start(Process process) {
  try {
    files_.open(process.file);
  } catch (const Error& failure) {
    log_warning(std::string("nothing is traced: ") + failure.what());
    return;
  }
  const TraceProcess about{.version = BPS_VERSION,
                           .name = std::move(process.name),
                           .host = std::move(process.host),
                           .clock = clock_identity(),
                           .pid = static_cast<std::uint64_t>(::getpid()),
                           .worker_rank = process.worker_rank,
                           .server_rank = process.server_rank,
                           .rings = static_cast<std::uint32_t>(rings_.size())};
  append_frame(frames_, TraceFrameKind::kProcess, 0, codec::encode(about));
  // Loops run already, and may have noted something.
  if (by_counter_) append_frame(frames_, TraceFrameKind::kClock, 0, codec::encode(begin_));
  for (const auto& [node, name] : process.nodes) {
    append_frame(frames_, TraceFrameKind::kNodeName, node, as_bytes(name));
  }
  noted_.resize(rings_.size());
  try {
    drain();
  } catch (const Error& failure) {
    files_.remove_events();
    log_warning(std::string("nothing is traced: ") + failure.what());
    return;
  }
  thread_ = start_thread([this] { run(); });
}

void TraceWriter::run() {
  name_thread("bps-trace");
  constexpr id_t kThisThread = 0;  // Linux means the thread by it; other systems mean the process
  (void)::setpriority(PRIO_PROCESS, kThisThread, kNiceness);
  try {
    for (bool stops = false; !stops;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, kPeriod, [this] { return stops_; });
        stops = stops_;
      }
      drain();
    }
  } catch (const std::exception& error) {
    log_warning(std::string("the trace ends: ") + error.what());
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stops_; });
  }
  files_.format([this] { return gives_up_.load(); });
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
}

void TraceWriter::drain() {
  // The rings come first: the names of what they hold now have been told when the names are appended.
  for (std::size_t i = 0; i < rings_.size(); ++i) noted_[i] = rings_[i].noted();
  append_changes();
  files_.append({frames_});
  frames_.clear();
  for (std::size_t i = 0; i < rings_.size(); ++i) {
    if (noted_[i][0].empty()) continue;
    append_ring(static_cast<std::uint32_t>(i), noted_[i]);
    rings_[i].free(noted_[i][0].size() + noted_[i][1].size());
  }
}

// Appends what the counter shows, names, spans, and how much was dropped.
void TraceWriter::append_changes() {
  if (by_counter_) append_frame(frames_, TraceFrameKind::kClock, 0, codec::encode(TickSample::take()));
  notes_.take(frames_);
  const TraceDropped all{dropped()};
  if (std::exchange(said_dropped_, all.events) == all.events) return;
  append_frame(frames_, TraceFrameKind::kDropped, 0, codec::encode(all));
}

// Writes the events of one ring, from its own memory.
void TraceWriter::append_ring(std::uint32_t number, const TraceRing::Noted& noted) {
  const std::array parts{std::as_bytes(noted[0]), std::as_bytes(noted[1])};
  const TraceFrameHeader header{.kind = TraceFrameKind::kEvents,
                                .number = number,
                                .size = static_cast<std::uint32_t>(parts[0].size() + parts[1].size())};
  files_.append({codec::bytes_of(header), parts[0], parts[1]});
}

std::uint64_t TraceWriter::dropped() {
  std::uint64_t all = 0;
  for (const TraceRing& ring : rings_) all += ring.dropped();
  return all + notes_.dropped();
}

}  // namespace bps
