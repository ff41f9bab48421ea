// SPDX-License-Identifier: Apache-2.0
#include "core/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <span>

#include "core/error.h"
#include "core/hmac.h"

namespace bps {
namespace {

constexpr int kForReading = O_RDONLY | O_NONBLOCK | O_CLOEXEC;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, path + " " + what,
              "somebody else may have put it there: remove it, or name another folder");
}

std::string hidden_name(const std::string& name) {
  std::uint64_t number = 0;
  random_bytes(std::as_writable_bytes(std::span(&number, 1)));
  std::array<char, 17> digits{};
  (void)std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(number));
  std::string hidden = ".";
  hidden += name;
  hidden += '.';
  return hidden += digits.data();
}

Fd create(int folder, const std::string& name, mode_t mode) {
  return Fd(::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
}

// Returns the user who owns what this process makes in that folder.
uid_t owner_of_new(int folder) {
  const std::string name = hidden_name("bps");
  const Fd probe = create(folder, name, 0600);
  struct stat made{};
  const bool known = probe && ::fstat(probe.get(), &made) == 0;
  if (probe) ::unlinkat(folder, name.c_str(), 0);
  return known ? made.st_uid : ::geteuid();
}

OpenedFile checked(Fd file, const std::string& path) {
  OpenedFile opened{.file = std::move(file)};
  if (!opened.file) {
    if (errno == ELOOP) refuse(path, "is a symbolic link");
    if (errno == ENXIO) refuse(path, "is not a regular file");  // it is a socket, or a device that is not there
    return opened;
  }
  if (::fstat(opened.file.get(), &opened.status) != 0) throw_errno("cannot look at " + path);
  if (!S_ISREG(opened.status.st_mode)) refuse(path, "is not a regular file");
  return opened;
}

}  // namespace

FileName split_path(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return {".", path};
  return {path.substr(0, slash == 0 ? 1 : slash), path.substr(slash + 1)};
}

void check_owner(int folder, const struct stat& found, const std::string& path) {
  if (found.st_uid == ::geteuid() || found.st_uid == 0 || found.st_uid == owner_of_new(folder)) return;
  refuse(path, "belongs to user " + std::to_string(found.st_uid) + ", not to user " + std::to_string(::geteuid()));
}

Fd open_folder(const std::string& path) {
  Fd folder(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder) throw_errno("cannot open the folder " + path, "make it, or name another one");
  return folder;
}

Fd open_own_folder(const std::string& path, mode_t mode) {
  if (::mkdir(path.c_str(), mode) != 0 && errno != EEXIST) return {};
  Fd folder(::open(path.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!folder) {
    if (errno == ELOOP || errno == ENOTDIR) refuse(path, "is not a folder, or a link to one");
    return {};
  }
  struct stat found{};
  if (::fstat(folder.get(), &found) != 0) throw_errno("cannot look at " + path);
  check_owner(folder.get(), found, path);
  return folder;
}

OpenedFile open_regular(int folder, const std::string& name, const std::string& path) {
  return checked(Fd(::openat(folder, name.c_str(), kForReading | O_NOFOLLOW)), path);
}

OpenedFile open_named(const std::string& path) {
  return checked(Fd(::open(path.c_str(), kForReading)), path);
}

NewFile::NewFile(int folder, FileName name, mode_t mode)
    : folder_(folder), name_(std::move(name)), part_(hidden_name(name_.name)), file_(create(folder, part_, mode)) {
  if (!file_) fail();
}

NewFile::~NewFile() {
  if (file_) ::unlinkat(folder_, part_.c_str(), 0);
}

void NewFile::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file_.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail();
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void NewFile::sync() {
  if (::fsync(file_.get()) != 0) fail();
}

void NewFile::replace() {
  if (::renameat(folder_, part_.c_str(), folder_, name_.name.c_str()) != 0) fail();
  file_.reset();
}

bool NewFile::keep_if_first() {
  if (::linkat(folder_, part_.c_str(), folder_, name_.name.c_str(), 0) == 0) return true;
  if (errno == EEXIST) return false;
  fail();
}

void NewFile::fail() const {
  throw_errno("cannot write " + path(), "look at that folder and at the space on that disk");
}

}  // namespace bps
