// SPDX-License-Identifier: Apache-2.0
#include "pool/server_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "core/error.h"
#include "core/fd.h"
#include "core/log.h"
#include "core/system_calls.h"
#include "pool/read_file.h"

namespace bps::pool {
namespace {

constexpr const char* kVariable = "_BPS_POOLED";
constexpr const char* kProgram = "/proc/self/exe";  // the version that runs, whatever has been installed since
// Bounds private memory beyond the share that is mapped and not used: the stacks of threads, and what malloc keeps.
constexpr std::uint64_t kMapped = 512U << 20;

std::string proc(int pid, const char* file) {
  return "/proc/" + std::to_string(pid) + "/" + file;
}

struct Times {
  char state = 'X';
  std::uint64_t computed = 0;  // in ticks
  std::uint64_t begun = 0;
};

// Reads the fields 3, 14 and 15, and 22 of /proc/PID/stat. The name of the program, which comes before, may have any
// bytes.
Times times_of(int pid) {
  const std::string stat = read_file(proc(pid, "stat"));
  const std::size_t end = stat.rfind(')');
  Times times;
  if (end == stat.npos) return times;
  std::istringstream fields(stat.substr(end + 1));
  fields >> times.state;
  std::uint64_t value = 0;
  for (int field = 4; field <= 22 && fields >> value; ++field) {
    if (field == 14 || field == 15) times.computed += value;
    if (field == 22) times.begun = value;
  }
  return times;
}

std::string variable_of(int pid) {
  const std::string all = read_file(proc(pid, "environ"));
  const std::string begin = std::string(kVariable) + "=";
  for (std::size_t at = 0; at < all.size();) {
    const std::size_t end = std::min(all.find('\0', at), all.size());
    if (all.compare(at, begin.size(), begin) == 0) return all.substr(at + begin.size(), end - at - begin.size());
    at = end + 1;
  }
  return "";
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) return "was killed by signal " + std::to_string(WTERMSIG(status));
  return "ended with status " + std::to_string(WEXITSTATUS(status));
}

struct SpawnOptions {
  posix_spawnattr_t attributes{};
  posix_spawn_file_actions_t actions{};
  SpawnOptions() {
    ::posix_spawnattr_init(&attributes);
    ::posix_spawn_file_actions_init(&actions);
  }
  ~SpawnOptions() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  SpawnOptions(const SpawnOptions&) = delete;
  SpawnOptions& operator=(const SpawnOptions&) = delete;
};

}  // namespace

std::string name_of_pool(const std::string& address, std::uint16_t port) {
  struct stat network{};
  (void)::stat("/proc/self/ns/net", &network);
  return std::to_string(port) + "@" + address + "@" + std::to_string(network.st_ino);
}

std::string Assignment::to_text() const {
  std::string text = pool + " " + std::to_string(seat) + " " + std::to_string(share.cores) + " " +
                     std::to_string(share.memory) + " " + user + " ";
  for (const int cpu : cpus) {
    if (text.back() != ' ') text += ',';
    text += std::to_string(cpu);
  }
  return text + " " + job;
}

std::optional<Assignment> Assignment::from_text(const std::string& text) {
  std::istringstream in(text);
  Assignment found;
  std::string cpus;
  if (!(in >> found.pool >> found.seat >> found.share.cores >> found.share.memory >> found.user >> cpus)) return {};
  in.get();
  std::getline(in, found.job);
  for (const char* at = cpus.data(); at < cpus.data() + cpus.size(); ++at) {
    int cpu = 0;
    const auto [end, error] = std::from_chars(at, cpus.data() + cpus.size(), cpu);
    if (error != std::errc() || cpu < 0 || cpu >= CPU_SETSIZE) return {};
    found.cpus.push_back(cpu);
    at = end;
  }
  return found;
}

ServerProcess ServerProcess::start(const Assignment& assignment, std::vector<std::string> environment,
                                   const std::string& secret) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  const Fd out(ends[0]);
  Fd in(ends[1]);
  // A pipe takes this at once.
  if (::write(in.get(), secret.data(), secret.size()) != static_cast<ssize_t>(secret.size())) {
    throw_errno("cannot write into a pipe");
  }
  in.reset();
  environment.push_back(std::string(kVariable) + "=" + assignment.to_text());
  std::vector<char*> variables;
  for (std::string& each : environment) variables.push_back(each.data());
  variables.push_back(nullptr);
  std::array<std::string, 2> words{"bps-server", "--pooled"};
  std::array<char*, 3> arguments{words[0].data(), words[1].data(), nullptr};

  SpawnOptions options;
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&options.attributes, &none);
  ::posix_spawnattr_setflags(&options.attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
  ::posix_spawn_file_actions_adddup2(&options.actions, out.get(), STDIN_FILENO);
  pid_t pid = 0;
  const int error =
      ::posix_spawn(&pid, kProgram, &options.actions, &options.attributes, arguments.data(), variables.data());
  if (error != 0) {
    errno = error;
    throw_errno("cannot start a server");
  }
  return {pid, times_of(pid).begun, true};
}

std::vector<ServerProcess::Found> ServerProcess::find(const std::string& pool) {
  std::vector<Found> found;
  std::error_code error;
  for (std::filesystem::directory_iterator at("/proc", error), end; at != end && !error; at.increment(error)) {
    const std::string name = at->path().filename();
    int pid = 0;
    const auto [stop, bad] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (bad != std::errc() || stop != name.data() + name.size() || pid == ::getpid()) continue;
    // Another user could write what they like into the environment of a process of theirs.
    struct stat status{};
    if (::stat(at->path().c_str(), &status) != 0 || status.st_uid != ::geteuid()) continue;
    const Times times = times_of(pid);
    auto assignment = Assignment::from_text(variable_of(pid));
    const ServerProcess process(pid, times.begun, false);
    if (assignment && assignment->pool == pool && process.is_there()) found.push_back({process, *assignment});
  }
  return found;
}

bool ServerProcess::is_there() const {
  const Times times = times_of(pid_);
  return times.begun == begun_ && times.state != 'Z' && times.state != 'X';
}

std::optional<std::string> ServerProcess::look() {
  if (!is_child_) return is_there() ? std::nullopt : std::optional<std::string>("ended");
  int status = 0;
  const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
  if (ended == 0 || (ended < 0 && errno == EINTR)) return std::nullopt;
  return ended == pid_ ? describe(status) : "ended";
}

void ServerProcess::kill(int signal) const {
  if (is_child_) {  // it is at most a zombie, which keeps its number
    (void)::kill(pid_, signal);
    return;
  }
  const Fd process(pidfd_open(pid_));
  if (!is_there()) return;
  if (process) {
    (void)pidfd_send_signal(process.get(), signal);
  } else {
    (void)::kill(pid_, signal);
  }
}

std::uint64_t ServerProcess::memory() const {
  const std::string status = read_file(proc(pid_, "status"));
  const std::size_t at = status.find("RssAnon:");
  return at == status.npos || !is_there() ? 0 : std::strtoull(status.c_str() + at + 8, nullptr, 10) << 10;
}

double ServerProcess::cpu_seconds() const {
  const Times times = times_of(pid_);
  return times.begun == begun_ ? static_cast<double>(times.computed) / static_cast<double>(::sysconf(_SC_CLK_TCK)) : 0;
}

std::string follow_assignment() {
  const char* text = std::getenv(kVariable);
  const auto assignment = Assignment::from_text(text == nullptr ? "" : text);
  if (!assignment) {
    throw Error(ErrorCode::kInvalidArgument, "--pooled is for a pool, which starts its servers by it",
                "start a pool (--pool), or a server without it");
  }
  (void)::signal(SIGPIPE, SIG_IGN);  // this process may outlive whoever reads what it prints
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : assignment->cpus) CPU_SET(static_cast<std::size_t>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) log_warning("this server cannot keep to its cores");
  const rlim_t most = assignment->share.memory + kMapped;
  const rlimit data{most, most};
  (void)::setrlimit(RLIMIT_DATA, &data);
  const rlimit nothing{0, 0};
  (void)::setrlimit(RLIMIT_CORE, &nothing);  // a core file would show the secret to whoever can read it

  std::string secret;
  std::array<char, 256> buffer{};
  for (ssize_t got = 0; (got = ::read(STDIN_FILENO, buffer.data(), buffer.size())) != 0;) {
    if (got < 0 && errno != EINTR) throw_errno("cannot read the secret of the job");
    if (got > 0) secret.append(buffer.data(), static_cast<std::size_t>(got));
  }
  const Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  (void)::dup2(null.get(), STDIN_FILENO);
  return secret;
}

}  // namespace bps::pool
