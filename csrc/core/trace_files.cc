// SPDX-License-Identifier: Apache-2.0
#include "core/trace_files.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <system_error>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "core/trace_format.h"

namespace bps {
namespace {

// Makes a new file each time, so that a file that another process still writes stays that process's. The folder is
// ours, so nobody else puts a file there.
Fd create(const Fd& folder, const std::string& name) {
  ::unlinkat(folder.get(), name.c_str(), 0);
  return Fd(::openat(folder.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666));
}

}  // namespace

void TraceFiles::open(const std::string& file) {
  file_ = file;
  const std::filesystem::path path(file_);
  events_file_ = std::filesystem::path(path).replace_extension(".events");
  std::error_code error;  // is met again below
  std::filesystem::create_directories(path.parent_path().parent_path(), error);
  folder_ = open_own_folder(path.parent_path(), 0777);
  if (folder_) {
    remove(file_);
    events_ = create(folder_, split_path(events_file_).name);
  }
  if (!events_) throw_errno("cannot write " + events_file_);
}

void TraceFiles::append(Parts parts) {
  for (;;) {
    std::array<iovec, 3> left{};
    int count = 0;
    for (const auto part : parts) {
      if (!part.empty()) left[static_cast<std::size_t>(count++)] = {const_cast<std::byte*>(part.data()), part.size()};
    }
    if (count == 0) return;
    const ssize_t written = ::writev(events_.get(), left.data(), count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      throw Error(ErrorCode::kTransport, "cannot write " + events_file_ + ": " + std::generic_category().message(errno),
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

void TraceFiles::format(const std::function<bool()>& gives_up) {
  try {
    NewFile json(folder_.get(), split_path(file_), 0666);
    format_trace(events_.get(), events_file_, json, gives_up);
    remove(events_file_);
  } catch (const std::exception& error) {
    log_warning(std::string(error.what()) + "; `bps trace` reads what was traced from " + events_file_);
  }
}

void TraceFiles::remove(const std::string& file) {
  ::unlinkat(folder_.get(), split_path(file).name.c_str(), 0);
}

}  // namespace bps
