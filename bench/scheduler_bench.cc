// SPDX-License-Identifier: Apache-2.0
// One scheduler and thousands of members on one machine: how long it takes until all have joined, what heartbeats cost,
// how soon all know that one of them is lost, and how long the next view and the end take. Prints lines of JSON.
//
//   scheduler_bench [WORKERS [SERVERS]]        4,096 workers and 64 servers
//
// Members are thin: they speak the whole protocol of the van, with handshakes, codes and heartbeats, and have neither
// loops nor tensors. They share this machine with the scheduler, whose processor time is told apart. The first member
// of each process checks the codes of messages and decodes its welcome; the others compare their bytes with that.
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "transport/message_mac.h"
#include "van/find_scheduler.h"
#include "van/messages.h"
#include "van/scheduler.h"

namespace {

using namespace bps;  // NOLINT: a program of one file

constexpr std::uint32_t kRanksPerHost = 8;
constexpr std::uint32_t kProcesses = 4;  // that hold the members
constexpr double kHeartbeatTimeout_s = 10;
constexpr double kPatience_s = 120;
constexpr int kIdle_s = 10;

double now_s() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

double processor_s(int who) {
  rusage use{};
  ::getrusage(who, &use);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

void allow_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

struct Job {
  std::uint32_t workers = 4096;
  std::uint32_t servers = 64;
  std::uint16_t port = 0;
  transport::Credentials credentials = transport::Credentials::from("scheduler_bench", "a secret of this benchmark");

  std::uint32_t members() const { return workers + servers; }
};

// As long as those of real processes: see `bps dump`.
van::Node node_of(const Job& job, std::uint32_t number, std::uint64_t identity) {
  van::Node node;
  const bool is_worker = number < job.workers;
  const std::uint32_t host = is_worker ? number / kRanksPerHost : job.workers + number;
  (is_worker ? node.worker_rank : node.server_rank) =
      static_cast<std::int32_t>(is_worker ? number : number - job.workers);
  (is_worker ? node.worker_loops : node.server_loops) = 1;
  node.pid = 10000 + number;
  node.host = "node-" + std::to_string(host) + ".cluster";
  node.host_key = "8f14e45f-ceea-467f-9a36-dedd4bea2543:" + std::to_string(host);
  node.identity = identity;
  node.link = 12'500'000'000;
  node.terms.min_workers = 1;
  if (is_worker) {
    node.sums_on_host = true;
    node.terms.placement = "auto";
    node.terms.key_hash = "raw";
    node.terms.built_in_coefficient = 1;
    node.terms.min_partition_bytes = 65536;
  }
  const auto address = [&](const char* transport, std::size_t bytes) {
    Bytes text(bytes);
    for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<std::byte>(i * (number + 1));
    node.addresses.push_back({transport, text});
  };
  address("shm", 48);
  address("tcp", 40);
  address("rdma", 64);
  return node;
}

// The members of one process, which has one buffer for all: what a large job says to each of them is long.
class Members {
 public:
  Members(const Job& job, std::uint32_t first, std::uint32_t count) : job_(job), first_(first), members_(count) {
    for (std::uint32_t i = 0; i < count; ++i) members_[i].identity = 1 + ((std::uint64_t{first} + i) << 20);
  }

  // All join, or join again, and are welcome.
  void join(bool again) {
    for (std::uint32_t i = 0; i < members_.size(); ++i) {
      Member& member = members_[i];
      if (member.is_gone) continue;
      if (again) member.before = std::exchange(member.line, {});
      connect(i);
      say(member.line, join_of(i));
      beat_if_due();
    }
    sample_.clear();
    for (Member& member : members_) {
      if (!member.is_gone) await(member, [&](std::span<const std::byte> bytes) { return note_welcome(member, bytes); });
    }
  }

  // Heartbeats, in both directions, until there is something to read.
  void beat_until_ready(int fd) {
    for (pollfd ready{fd, POLLIN, 0}; ::poll(&ready, 1, 20) == 0;) beat_if_due();
  }

  // The first member ends without a word.
  void lose_first() {
    members_.front().is_gone = true;
    members_.front().line = {};
  }
  void await_end_of_view() { await_all<van::ViewEnded>(); }

  void leave() {
    for (Member& member : members_) {
      if (member.is_gone) continue;
      say(member.line, van::Leave{1, 0, "", "", false});
      member.line.is_welcome = false;  // nothing is said after that
    }
    await_all<van::AllLeft>();
  }

 private:
  struct Line {
    Fd socket;
    std::optional<transport::MessageKeys> keys;
    bool is_welcome = false;
  };
  struct Member {
    Line line, before;  // in this view, and until then in the one before
    std::uint64_t identity = 0;
    std::uint32_t id = 0;  // in the view
    std::uint32_t epoch = 1;
    bool is_gone = false;
  };

  void connect(std::uint32_t i) {
    van::FoundScheduler found =
        van::find_scheduler("127.0.0.1", {job_.port}, job_.credentials, Deadline::after(kPatience_s));
    const timeval patience{static_cast<time_t>(kPatience_s), 0};
    ::setsockopt(found.socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    members_[i].line = {std::move(found.socket), transport::MessageKeys::of_client(found.session.key)};
    members_[i].epoch = found.session.view.epoch;
  }

  van::Join join_of(std::uint32_t i) const {
    const Member& member = members_[i];
    van::Join join{.node = node_of(job_, first_ + i, member.identity),
                   .workers = job_.workers,
                   .servers = job_.servers,
                   .patience_ms = static_cast<std::uint32_t>(kPatience_s * 1e3),
                   .renews = member.id,
                   .epoch = member.epoch};
    join.node.has_state = member.id != 0;
    return join;
  }

  void say(Line& line, const van::Message& message) {
    const Bytes bytes = van::encode(message);
    const auto length = static_cast<std::uint32_t>(bytes.size());
    Bytes framed(sizeof length);
    std::memcpy(framed.data(), &length, sizeof length);
    framed.insert(framed.end(), bytes.begin(), bytes.end());
    const transport::MessageMac code = line.keys->sent.sign(framed);
    framed.insert(framed.end(), code.begin(), code.end());
    if (::send(line.socket.get(), framed.data(), framed.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(framed.size())) {
      throw_errno("a member cannot speak to the scheduler");
    }
  }

  void read(Member& member, std::byte* to, std::size_t size) {
    if (::recv(member.line.socket.get(), to, size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
      throw_errno("a member does not hear the scheduler");
    }
  }

  // The next message. Its code is checked by the first member: a process of a job has one, not a thousand.
  std::span<const std::byte> hear(Member& member) {
    std::uint32_t length = 0;
    buffer_.resize(std::max(buffer_.size(), sizeof length));
    read(member, buffer_.data(), sizeof length);
    std::memcpy(&length, buffer_.data(), sizeof length);
    const std::size_t size = sizeof length + length;
    buffer_.resize(std::max(buffer_.size(), size + sizeof(transport::MessageMac)));
    read(member, buffer_.data() + sizeof length, length + sizeof(transport::MessageMac));
    if (&member == members_.data()) {
      const transport::MessageMac code = member.line.keys->received.sign(std::span(buffer_).first(size));
      if (!std::ranges::equal(code, std::span(buffer_).subspan(size, code.size()))) {
        throw std::runtime_error("a message with a wrong code");
      }
    }
    return std::span(buffer_).subspan(sizeof length, length);
  }

  void await(Member& member, const std::function<bool(std::span<const std::byte>)>& is_it) {
    do {
      beat_if_due();
    } while (!is_it(hear(member)));
  }
  template <typename Awaited>
  void await_all() {
    for (Member& member : members_) {
      if (member.is_gone) continue;
      await(member, [](std::span<const std::byte> bytes) {
        const auto message = van::decode(bytes);
        if (!message) throw std::runtime_error("a malformed message");
        if (const auto* refused = std::get_if<van::Refused>(&*message)) throw std::runtime_error(refused->text);
        return std::holds_alternative<Awaited>(*message);
      });
    }
  }

  bool note_welcome(Member& member, std::span<const std::byte> bytes) {
    static const std::byte kWelcome = van::encode(van::Message(van::Welcome{})).front();
    if (bytes.front() != kWelcome) {
      const auto message = van::decode(bytes);
      const auto* refused = message ? std::get_if<van::Refused>(&*message) : nullptr;
      if (refused != nullptr) throw std::runtime_error(refused->text);
      return false;
    }
    if (sample_.empty()) {
      const auto message = van::decode(bytes);
      const auto* welcome = message ? std::get_if<van::Welcome>(&*message) : nullptr;
      if (welcome == nullptr) throw std::runtime_error("a malformed welcome");
      sample_.assign(bytes.begin(), bytes.end());
      ids_.clear();
      for (const van::Node& node : welcome->membership.nodes) ids_.emplace(node.identity, node.id);
      beat_s_ = welcome->beat_ms / 1e3;
    } else if (!std::ranges::equal(bytes, sample_)) {
      throw std::runtime_error("two members were told different things");
    }
    member.id = ids_.at(member.identity);
    member.line.is_welcome = true;
    member.before = {};
    return true;
  }

  void beat_if_due() {
    if (now_s() < last_beat_s_ + beat_s_) return;
    last_beat_s_ = now_s();
    for (Member& member : members_) {
      if (member.is_gone) continue;
      for (Line* const line : {&member.before, &member.line}) {
        if (line->is_welcome) say(*line, van::Heartbeat{});
      }
    }
  }

  const Job& job_;
  const std::uint32_t first_;
  std::vector<Member> members_;
  Bytes buffer_;
  Bytes sample_;                                          // the welcome to this view
  std::unordered_map<std::uint64_t, std::uint32_t> ids_;  // by identity
  double beat_s_ = 1;
  double last_beat_s_ = 0;
};

// A child process, told what to do next by a byte, and answering with one.
class Child {
 public:
  template <typename Body>
  explicit Child(Body body) {
    int down[2], up[2];
    if (::pipe(down) != 0 || ::pipe(up) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      int status = 0;
      try {
        body(down[0], up[1]);
      } catch (const std::exception& error) {
        (void)std::fprintf(stderr, "%s\n", error.what());
        status = 1;
      }
      ::_exit(status);
    }
    ::close(down[0]);
    ::close(up[1]);
    to_ = Fd(down[1]);
    from_ = Fd(up[0]);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);  // children hold the ends of each other's pipes
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void tell(char what) { (void)!::write(to_.get(), &what, 1); }
  template <typename T>
  T take() {
    T value{};
    if (::read(from_.get(), &value, sizeof value) != static_cast<ssize_t>(sizeof value)) {
      throw std::runtime_error("a process of the benchmark has ended");
    }
    return value;
  }

 private:
  pid_t pid_ = 0;
  Fd to_, from_;
};

struct Usage {
  double processor_s;
  long memory_kib;
};

void be_scheduler(const Job& job, int from, int to) {
  van::Scheduler scheduler({.address = "127.0.0.1",
                            .ports = {0},
                            .workers = job.workers,
                            .servers = job.servers,
                            .heartbeat_timeout_s = kHeartbeatTimeout_s,
                            .join_timeout_s = kPatience_s,
                            .terms = {.min_workers = 1},
                            .on_lost = nullptr},
                           job.credentials);
  const std::uint16_t port = scheduler.port();
  (void)!::write(to, &port, sizeof port);
  for (char what = 0; ::read(from, &what, 1) == 1;) {
    rusage use{};
    ::getrusage(RUSAGE_SELF, &use);
    const Usage usage{processor_s(RUSAGE_SELF), use.ru_maxrss};
    (void)!::write(to, &usage, sizeof usage);
  }
}

void be_members(const Job& job, std::uint32_t first, std::uint32_t count, int from, int to) {
  Members members(job, first, count);
  bool is_idle = true;
  while (is_idle) {
    char what = 0;
    members.beat_until_ready(from);
    if (::read(from, &what, 1) != 1) return;
    switch (what) {
      case 'j': members.join(false); break;
      case 'x':
        members.lose_first();
        members.await_end_of_view();
        break;
      case 'w': members.await_end_of_view(); break;
      case 'r': members.join(true); break;
      case 'l': members.leave(); break;
      default: is_idle = false;
    }
    (void)!::write(to, &what, 1);
  }
}

int run(Job job) {
  Child scheduler([&](int from, int to) { be_scheduler(job, from, to); });
  job.port = scheduler.take<std::uint16_t>();
  std::deque<Child> processes;
  for (std::uint32_t i = 0; i < kProcesses; ++i) {
    const auto from_number = [&](std::uint32_t n) {
      return static_cast<std::uint32_t>(std::uint64_t{job.members()} * n / kProcesses);
    };
    processes.emplace_back([&, first = from_number(i), count = from_number(i + 1) - from_number(i)](int from, int to) {
      be_members(job, first, count, from, to);
    });
  }
  const auto usage = [&] {
    scheduler.tell('u');
    return scheduler.take<Usage>();
  };
  const auto step = [&](const char* name, const std::string& first, char others) {
    const Usage before = usage();
    const double start = now_s();
    for (std::size_t i = 0; i < processes.size(); ++i) processes[i].tell(i == 0 ? first[0] : others);
    for (Child& process : processes) (void)process.take<char>();
    const double took = now_s() - start;
    const Usage after = usage();
    std::printf(
        "{\"step\": \"%s\", \"members\": %u, \"seconds\": %.3f, \"scheduler_processor_seconds\": %.3f, "
        "\"scheduler_mib\": %ld}\n",
        name, job.members(), took, after.processor_s - before.processor_s, after.memory_kib >> 10);
    (void)std::fflush(stdout);
  };
  step("join", "j", 'j');
  ::sleep(1);
  const Usage before = usage();
  ::sleep(kIdle_s);
  std::printf("{\"step\": \"heartbeats\", \"members\": %u, \"scheduler_share_of_a_core\": %.4f}\n", job.members(),
              (usage().processor_s - before.processor_s) / kIdle_s);
  step("lost", "x", 'w');
  step("next view", "r", 'r');
  step("leave", "l", 'l');
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    allow_descriptors();
    Job job;
    if (argc > 1) job.workers = static_cast<std::uint32_t>(std::stoul(argv[1]));
    if (argc > 2) job.servers = static_cast<std::uint32_t>(std::stoul(argv[2]));
    return run(job);
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "scheduler_bench: %s\n", error.what());
    return 1;
  }
}
