// SPDX-License-Identifier: Apache-2.0
#include "core/trace_writer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <span>
#include <system_error>

#include "core/error.h"
#include "core/files.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "core/threads.h"
#include "core/trace_format.h"

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

// A new file each time: one that another process still writes stays that one's. The folder is ours, so nobody else has
// made it.
Fd create(const Fd& folder, const std::string& name) {
  ::unlinkat(folder.get(), name.c_str(), 0);
  return Fd(::openat(folder.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666));
}

void write_all(int file, const std::string& name, std::array<std::span<const std::byte>, 3> parts) {
  for (;;) {
    std::array<iovec, 3> left{};
    int count = 0;
    for (const auto part : parts) {
      if (!part.empty()) left[static_cast<std::size_t>(count++)] = {const_cast<std::byte*>(part.data()), part.size()};
    }
    if (count == 0) return;
    const ssize_t written = ::writev(file, left.data(), count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      throw Error(ErrorCode::kTransport, "cannot write " + name + ": " + std::generic_category().message(errno),
                  "look at the space on that disk");
    }
    auto over = static_cast<std::size_t>(written);
    for (auto& part : parts) {
      const std::size_t of_part = std::min(over, part.size());
      part = part.subspan(of_part);
      over -= of_part;
    }
  }
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
    check_interrupt();  // before the thread formats anything, so that all events stay where they are
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

void TraceWriter::name_tensor(std::uint32_t tensor, const std::string& name) {
  const std::lock_guard lock(mutex_);
  append_frame(names_, TraceFrameKind::kTensorName, tensor, as_bytes(name));
}

void TraceWriter::record_span(const std::string& name, std::uint32_t step, std::uint64_t begin, std::uint64_t end) {
  if (!rounds_.contain(step)) return;
  const std::lock_guard lock(mutex_);
  if (spans_.size() == kSpans || name.size() > TraceProcess::kMostText) {
    ++spans_dropped_;
    return;
  }
  const auto [found, is_new] = span_numbers_.try_emplace(name, static_cast<std::uint32_t>(span_numbers_.size()));
  if (is_new) append_frame(names_, TraceFrameKind::kSpanName, found->second, as_bytes(name));
  spans_.push_back({.begin = begin, .end = end, .name = found->second, .step = step});
}

void TraceWriter::start(Process process) {
  file_ = std::move(process.file);
  try {
    open_files();
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
    remove(events_file_);
    log_warning(std::string("nothing is traced: ") + failure.what());
    return;
  }
  thread_ = start_thread([this] { run(); });
}

void TraceWriter::open_files() {
  const std::filesystem::path path(file_);
  events_file_ = std::filesystem::path(path).replace_extension(".events");
  std::error_code error;  // is met again below
  std::filesystem::create_directories(path.parent_path().parent_path(), error);
  folder_ = open_own_folder(path.parent_path(), 0777);
  if (folder_) {
    remove(file_);  // of an earlier job
    events_ = create(folder_, split_path(events_file_).name);
  }
  if (!events_) throw_errno("cannot write " + events_file_);
}

void TraceWriter::remove(const std::string& file) {
  ::unlinkat(folder_.get(), split_path(file).name.c_str(), 0);
}

void TraceWriter::run() {
  name_thread("bps-trace");
  constexpr id_t kThisThread = 0;  // on Linux; others mean the process
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
  format();
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
}

void TraceWriter::format() {
  try {
    NewFile json(folder_.get(), split_path(file_), 0666);
    format_trace(events_.get(), events_file_, json, [this] { return gives_up_.load(); });
    remove(events_file_);
  } catch (const std::exception& error) {
    log_warning(std::string(error.what()) + "; `bps trace` reads what was traced from " + events_file_);
  }
}

void TraceWriter::drain() {
  // First the rings: the names of what they hold now have been told by then.
  for (std::size_t i = 0; i < rings_.size(); ++i) noted_[i] = rings_[i].noted();
  append_changes();
  write_all(events_.get(), events_file_, {frames_});
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
  taken_spans_.clear();
  {
    const std::lock_guard lock(mutex_);
    frames_.insert(frames_.end(), names_.begin(), names_.end());
    names_.clear();
    taken_spans_.swap(spans_);
  }
  if (!taken_spans_.empty()) {
    append_frame(frames_, TraceFrameKind::kSpans, 0, std::as_bytes(std::span<const TraceSpan>(taken_spans_)));
  }
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
  write_all(events_.get(), events_file_, {codec::bytes_of(header), parts[0], parts[1]});
}

std::uint64_t TraceWriter::dropped() {
  std::uint64_t all = 0;
  for (const TraceRing& ring : rings_) all += ring.dropped();
  const std::lock_guard lock(mutex_);
  return all + spans_dropped_;
}

}  // namespace bps
