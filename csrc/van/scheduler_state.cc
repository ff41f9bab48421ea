// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler_state.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "core/error.h"
#include "core/files.h"
#include "core/hmac.h"

namespace bps::van {
namespace {

constexpr std::string_view kBegin = "bps-scheduler: run ";
constexpr std::size_t kMostBytes = 64;

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, path + ": " + why, "");
}

std::optional<std::uint64_t> read_run(const Fd& folder, const std::string& path) {
  const OpenedFile opened = open_regular(folder.get(), split_path(path).name, path);
  if (!opened.file) {
    if (errno == ENOENT) return std::nullopt;
    fail(path, std::strerror(errno));
  }
  check_owner(folder.get(), opened.status, path);
  // The owner of the file, who may change it anyway, or root has let a group write. Kubernetes does so (fsGroup).
  if ((opened.status.st_mode & S_IWOTH) != 0) fail(path, "every user can write it: chmod o-w " + path);
  std::array<char, kMostBytes> bytes{};
  const ssize_t size = ::read(opened.file.get(), bytes.data(), bytes.size());
  if (size < 0) fail(path, std::strerror(errno));
  const std::string_view text(bytes.data(), static_cast<std::size_t>(size));
  std::uint64_t run = 0;
  if (text.starts_with(kBegin) && text.ends_with('\n')) {
    const std::string_view number = text.substr(kBegin.size(), text.size() - kBegin.size() - 1);
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), run, 16);
    if (error == std::errc() && end == number.data() + number.size() && run != 0) return run;
  }
  fail(path, "this is no file of a scheduler");
}

KnownRun read_or_make(const std::string& path) {
  const FileName name = split_path(path);
  const Fd folder = open_folder(name.folder);
  if (const auto run = read_run(folder, path)) return {*run, true};
  std::uint64_t run = 0;
  while (run == 0) random_bytes(std::as_writable_bytes(std::span(&run, 1)));
  std::array<char, 16> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), run, 16).ptr;
  NewFile file(folder.get(), name, 0600);
  file.write(std::string(kBegin) + std::string(digits.data(), end) + "\n");
  file.sync();
  if (file.keep_if_first()) return {run, false};
  if (const auto other = read_run(folder, path)) return {*other, true};
  fail(path, "it was removed while it was read");
}

}  // namespace

KnownRun run_from_state(const std::string& path) {
  try {
    return read_or_make(path);
  } catch (const Error& error) {
    throw Error(ErrorCode::kInvalidArgument, std::string("BPS_SCHEDULER_STATE: ") + error.what(),
                "name a file that not every user can write, in a folder that is there, another one for each job");
  }
}

void forget_state(const std::string& path) {
  ::unlink(path.c_str());
}

}  // namespace bps::van
