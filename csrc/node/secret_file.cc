// SPDX-License-Identifier: Apache-2.0
#include "node/secret_file.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/files.h"
#include "core/hmac.h"

namespace bps::node {
namespace {

constexpr std::size_t kMostBytes = 4096;
constexpr std::string_view kSetting = "BPS_SECRET_FILE";
constexpr const char* kName = "secret";

std::string octal(mode_t mode) {
  constexpr char kDigits[] = "01234567";
  return {'0', kDigits[mode >> 6 & 7], kDigits[mode >> 3 & 7], kDigits[mode & 7]};
}

[[noreturn]] void reject(const std::string& what, const std::string& hint) {
  throw Error(ErrorCode::kInvalidArgument, what, hint);
}

// Throws unless `found` belongs to this user (or to root, for files that an administrator has put there), and to nobody
// else.
void check_private(const struct stat& found, const std::string& path, bool may_be_of_root, std::string_view setting) {
  if (found.st_uid != ::geteuid() && !(may_be_of_root && found.st_uid == 0)) {
    reject(path + " belongs to user " + std::to_string(found.st_uid) + ", not to user " + std::to_string(::geteuid()),
           "remove it, or set " + std::string(setting) + " to a file of your own" +
               (setting == kSetting ? " (openssl rand -hex 32 > FILE; chmod 600 FILE)" : ""));
  }
  if ((found.st_mode & 077) != 0) {
    const bool is_folder = S_ISDIR(found.st_mode);
    reject(path + " can be used by other users: its mode is " + octal(found.st_mode),
           "chmod " + std::string(is_folder ? "700 " : "600 ") + path +
               (is_folder ? "" : ", and make a new secret if others may have read this one"));
  }
}

// Returns the text of the file's first `most` bytes.
std::string read_text(const OpenedFile& opened, const std::string& path, std::size_t most) {
  std::string text(most, '\0');
  const auto got = ::read(opened.file.get(), text.data(), text.size());
  if (got < 0) throw_errno("cannot read " + path);
  text.resize(static_cast<std::size_t>(got));
  constexpr const char* kSpace = " \t\r\n";
  text.erase(text.find_last_not_of(kSpace) + 1);
  text.erase(0, text.find_first_not_of(kSpace));
  return text;
}

std::string read_checked(const OpenedFile& opened, const std::string& path, bool may_be_of_root) {
  check_private(opened.status, path, may_be_of_root, kSetting);
  std::string text = read_text(opened, path, kMostBytes);
  if (text.size() < kLeastSecretBytes) {
    reject("the secret in " + path + " has " + std::to_string(text.size()) + " bytes, which is too short",
           "make a longer one: openssl rand -hex 32 > " + path);
  }
  return text;
}

// ---- The secret of the host

bool is_of_this_user(const std::string& path) {
  struct stat found{};
  return !path.empty() && path.front() == '/' && ::stat(path.c_str(), &found) == 0 && found.st_uid == ::geteuid();
}

// Lists where the file may lie, the best first. A variable that names another user's folder, as after `sudo -E`, is
// ignored.
std::vector<std::string> candidates() {
  const std::string uid = std::to_string(::geteuid());
  std::vector<std::string> found;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  for (const std::string& folder : {std::string(runtime == nullptr ? "" : runtime), "/run/user/" + uid}) {
    if (is_of_this_user(folder)) found.push_back(folder + "/bps_rdma");
  }
  const char* home = std::getenv("HOME");
  if (const passwd* user = home == nullptr ? ::getpwuid(::geteuid()) : nullptr) home = user->pw_dir;
  if (home != nullptr && is_of_this_user(home)) {
    (void)::mkdir((std::string(home) + "/.config").c_str(), 0700);
    found.push_back(std::string(home) + "/.config/bps_rdma");
  }
  found.push_back("/tmp/bps_rdma-" + uid);
  return found;
}

// Opens the folder, and makes it if it is not there. Returns nothing where there can be none.
Fd open_private_folder(const std::string& path) {
  Fd folder = open_own_folder(path, 0700);
  if (!folder) return {};
  struct stat found{};
  if (::fstat(folder.get(), &found) != 0) throw_errno("cannot look at " + path);
  check_private(found, path, false, kSetting);
  return folder;
}

std::string random_text() {
  std::array<std::byte, 32> bytes;
  random_bytes(bytes);
  std::string text;
  for (const std::byte byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<unsigned>(byte) >> 4];
    text += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return text;
}

// Makes the file, unless another process was faster. It appears whole or not at all.
void make_secret(const Fd& folder, const std::string& path) {
  try {
    NewFile file(folder.get(), split_path(path), 0600);
    file.write(random_text() + "\n");
    (void)file.keep_if_first();
  } catch (const Error&) {  // another folder may do
  }
}

OpenedFile open_secret(const Fd& folder, const std::string& path) {
  OpenedFile opened = open_regular(folder.get(), kName, path);
  if (!opened.file && errno == EACCES) reject(path + " cannot be read", "chmod 600 " + path + ", or remove it");
  return opened;
}

}  // namespace

std::string read_secret_file(const std::string& path) {
  const OpenedFile opened = open_named(path);
  if (!opened.file) {
    reject("cannot read BPS_SECRET_FILE=" + path + ": " + std::strerror(errno),
           "make it on every host: openssl rand -hex 32 > " + path + "; chmod 600 " + path);
  }
  return read_checked(opened, path, true);
}

std::string read_private_file(const std::string& path, std::string_view setting, std::size_t most) {
  const OpenedFile opened = open_named(path);
  if (!opened.file) {
    reject("cannot read " + std::string(setting) + "=" + path + ": " + std::strerror(errno),
           "name a file that you can read");
  }
  check_private(opened.status, path, true, setting);
  if (static_cast<std::uint64_t>(opened.status.st_size) > most) {
    reject(path + " has more than " + std::to_string(most) + " bytes", "name the file that holds the secret");
  }
  return read_text(opened, path, most);
}

std::string host_secret() {
  std::string tried;
  for (const std::string& folder_path : candidates()) {
    const std::string path = folder_path + "/" + kName;
    tried += (tried.empty() ? "" : ", ") + folder_path;
    const Fd folder = open_private_folder(folder_path);
    if (!folder) continue;
    OpenedFile opened = open_secret(folder, path);
    if (!opened.file) {
      make_secret(folder, path);
      opened = open_secret(folder, path);
    }
    if (opened.file) return read_checked(opened, path, false);
  }
  reject("no folder can hold the secret of this user (tried " + tried + ")",
         "make one writable, or set BPS_SECRET to random text, the same in all processes of the job");
}

}  // namespace bps::node
