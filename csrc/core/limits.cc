// SPDX-License-Identifier: Apache-2.0
#include "core/limits.h"

#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include "core/error.h"

namespace bps {
namespace {

// Less than this is not worth reading files for.
constexpr std::uint64_t kWorthChecking = 1 << 20;
constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::uint64_t soft_limit(__rlimit_resource resource) {
  rlimit found{};
  return ::getrlimit(resource, &found) == 0 && found.rlim_cur != RLIM_INFINITY ? found.rlim_cur : kUnlimited;
}

std::string first_word_of(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// "max" and an absent file mean that there is no limit.
std::uint64_t number_in(const std::string& path) {
  const std::string word = first_word_of(path);
  return word.empty() || word == "max" ? kUnlimited : std::strtoull(word.c_str(), nullptr, 10);
}

// Returns the sum of two lines of a memory.stat: the memory that the kernel cannot take back without swapping.
std::uint64_t held(const std::string& path, const std::string& private_memory, const std::string& shared_memory) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t value = 0;
  std::uint64_t sum = 0;
  while (file >> name >> value) {
    if (name == private_memory || name == shared_memory) sum += value;
  }
  return sum;
}

struct Memory {
  std::uint64_t limit = kUnlimited;
  std::uint64_t used = 0;
  std::string name;
  std::uint64_t left() const { return limit - std::min(limit, used); }
};

// Returns the memory that this process may use, by the tightest of the groups that it is in.
Memory memory_of_cgroups() {
  Memory tightest;
  const auto consider = [&](const std::string& folder, const char* limit, const char* priv, const char* shared) {
    const Memory found{number_in(folder + limit), held(folder + "/memory.stat", priv, shared), folder + limit};
    if (found.limit < kUnlimited && found.left() < tightest.left()) tightest = found;
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool unified = line.starts_with("0::");
    const std::size_t named = line.find(":memory:");
    if (!unified && named == std::string::npos) continue;
    std::string path = unified ? line.substr(3) : line.substr(named + 8);
    for (;; path.resize(path.rfind('/'))) {  // each group above limits it, too
      if (path == "/") path.clear();
      if (unified) {
        consider("/sys/fs/cgroup" + path, "/memory.max", "anon", "shmem");
      } else {
        consider("/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes", "total_rss", "total_shmem");
      }
      if (path.empty() || path.rfind('/') == std::string::npos) break;
    }
  }
  return tightest;
}

}  // namespace

std::optional<LimitReached> limit_behind(int error) {
  const auto value = [](std::uint64_t limit) { return std::to_string(limit); };
  if (error == EMFILE || error == ETOOMANYREFS) {
    return LimitReached{"the limit on open files is " + value(soft_limit(RLIMIT_NOFILE)) + " (RLIMIT_NOFILE)",
                        "raise it: `ulimit -n 65536`, `docker run --ulimit nofile=65536`, or LimitNOFILE= in a unit; "
                        "each array of empty() and each connection takes one file"};
  }
  if (error == ENFILE) {
    return LimitReached{"the limit on open files of the whole system is " + first_word_of("/proc/sys/fs/file-max"),
                        "raise it: `sysctl fs.file-max=NUMBER`, or find who holds so many files open"};
  }
  if (error == EFBIG && soft_limit(RLIMIT_FSIZE) != kUnlimited) {
    return LimitReached{"the limit on the size of a file is " + value(soft_limit(RLIMIT_FSIZE)) +
                            " bytes, shared memory included (RLIMIT_FSIZE)",
                        "raise it: `ulimit -f unlimited`, or LimitFSIZE=infinity in a unit"};
  }
  if (error == ENOMEM && soft_limit(RLIMIT_AS) != kUnlimited) {
    return LimitReached{"the limit on address space is " + value(soft_limit(RLIMIT_AS)) + " bytes (RLIMIT_AS)",
                        "raise it: `ulimit -v unlimited`, or LimitAS=infinity in a unit"};
  }
  if (error == EAGAIN && soft_limit(RLIMIT_NPROC) != kUnlimited) {
    return LimitReached{"the limit on processes and threads is " + value(soft_limit(RLIMIT_NPROC)) + " (RLIMIT_NPROC)",
                        "raise it: `ulimit -u 65536`, `docker run --pids-limit`, or LimitNPROC= in a unit"};
  }
  return std::nullopt;
}

std::uint64_t memory_limit() {
  struct sysinfo system{};
  ::sysinfo(&system);
  return std::min<std::uint64_t>(memory_of_cgroups().limit, system.totalram * system.mem_unit);
}

void check_memory(std::uint64_t bytes, const std::string& what_for) {
  if (bytes < kWorthChecking) return;
  struct sysinfo system{};
  ::sysinfo(&system);
  const std::uint64_t swap = system.totalswap * system.mem_unit;
  const std::uint64_t machine = system.totalram * system.mem_unit + swap;
  if (bytes > machine) {
    throw Error(ErrorCode::kTransport,
                what_for + ": " + std::to_string(bytes) + " bytes are more than the memory of the machine, " +
                    std::to_string(machine) + " bytes",
                "use smaller or fewer arrays, or more machines");
  }
  const Memory group = memory_of_cgroups();
  if (group.limit == kUnlimited || bytes <= group.left() + swap) return;
  throw Error(ErrorCode::kTransport,
              what_for + ": " + std::to_string(bytes) + " bytes do not fit into the memory limit of the cgroup, " +
                  std::to_string(group.limit) + " bytes, of which " + std::to_string(group.used) + " are used (" +
                  group.name + ")",
              "raise the limit (`docker run --memory`, a pod's resources.limits.memory, MemoryMax= in a unit), or use "
              "smaller arrays");
}

void throw_no_thread(int error) {
  const auto limit = limit_behind(error);
  const std::string why = limit ? limit->what : std::strerror(error);
  throw Error(
      ErrorCode::kTransport, "cannot start a thread: " + why,
      limit ? limit->hint : "end other processes of this user, or raise the limit on tasks: `ulimit -u`, pids.max");
}

}  // namespace bps
