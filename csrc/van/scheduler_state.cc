// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "core/error.h"
#include "core/fd.h"
#include "core/hmac.h"

namespace bps::van {
namespace {

constexpr std::string_view kBegin = "bps-scheduler: run ";
constexpr std::size_t kMostBytes = 64;

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, "BPS_SCHEDULER_STATE: " + path + ": " + why,
              "name a file that this user can write, another one for each job");
}

std::optional<std::uint64_t> read_run(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file) {
    if (errno == ENOENT) return std::nullopt;
    fail(path, std::strerror(errno));
  }
  std::array<char, kMostBytes> bytes{};
  const ssize_t size = ::read(file.get(), bytes.data(), bytes.size());
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

void write_all(const Fd& file, const std::string& text, const std::string& path) {
  const ssize_t written = ::write(file.get(), text.data(), text.size());
  if (written == static_cast<ssize_t>(text.size()) && ::fsync(file.get()) == 0) return;
  const std::string why = written < 0 ? std::strerror(errno) : "the disk is full";
  ::unlink(path.c_str());
  fail(path, why);
}

}  // namespace

KnownRun run_from_state(const std::string& path) {
  if (const auto run = read_run(path)) return {*run, true};
  std::uint64_t run = 0;
  while (run == 0) random_bytes(std::as_writable_bytes(std::span(&run, 1)));
  std::array<char, 16> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), run, 16).ptr;
  // Whole from the moment when it has its name.
  const std::string draft = path + "." + std::to_string(::getpid());
  const Fd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) fail(draft, std::strerror(errno));
  write_all(file, std::string(kBegin) + std::string(digits.data(), end) + "\n", draft);
  const int linked = ::link(draft.c_str(), path.c_str());
  const int error = errno;
  ::unlink(draft.c_str());
  if (linked == 0) return {run, false};
  if (error != EEXIST) fail(path, std::strerror(error));
  if (const auto other = read_run(path)) return {*other, true};
  fail(path, "it was removed while it was read");
}

void forget_state(const std::string& path) {
  ::unlink(path.c_str());
}

}  // namespace bps::van
