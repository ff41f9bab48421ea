// SPDX-License-Identifier: Apache-2.0
#include "node/inspection.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/fd.h"
#include "core/files.h"
#include "core/hmac.h"
#include "core/json.h"
#include "core/log.h"
#include "core/threads.h"
#include "node/local_address.h"

namespace bps::node {
namespace {

constexpr int kBacklog = 8;
constexpr timeval kClientPatience{.tv_sec = 1, .tv_usec = 0};
constexpr std::size_t kMostQuestions = 16;
constexpr std::size_t kMostRelays = 8;
constexpr auto kBetweenFiles = std::chrono::seconds(10);

// The handler uses these, and may run at any time.
std::atomic<int> g_event{-1};
std::atomic<pid_t> g_process{0};
std::atomic<int> g_handlers{0};  // handlers that may be about to write

void wake(int /*signal*/) {
  const int error = errno;
  ++g_handlers;
  if (const int event = g_event; event >= 0 && g_process == ::getpid()) ring(event);
  --g_handlers;
  errno = error;
}

void install() {
  struct sigaction now{};
  if (::sigaction(SIGUSR1, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  struct sigaction ours{};
  ours.sa_handler = wake;
  ours.sa_flags = SA_RESTART;
  ::sigemptyset(&ours.sa_mask);
  (void)::sigaction(SIGUSR1, &ours, nullptr);
}

// Returns true when the other side is a process of this user, or of root.
bool is_same_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == 0;
}

void send_all(int socket, std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = ::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;  // the other side has gone, or reads too slowly
    text.remove_prefix(static_cast<std::size_t>(sent));
  }
}

}  // namespace

Inspection::Inspection(Source source)
    : source_(std::move(source)),
      signalled_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      woken_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  try {
    if (!signalled_ || !woken_) throw Error(ErrorCode::kTransport, "too many open files", "raise `ulimit -n`");
    listen();
    thread_ = start_thread([this] { run(); });
  } catch (const std::exception& error) {
    log_warning(std::string("SIGUSR1, `bps why` and `bps top` will show nothing of this process: ") + error.what());
    return;
  }
  g_process = ::getpid();
  g_event = signalled_.get();
  install();
}

Inspection::~Inspection() {
  if (!thread_.joinable()) return;
  int mine = signalled_.get();
  (void)g_event.compare_exchange_strong(mine, -1);
  while (g_handlers > 0) std::this_thread::yield();  // else one could write to what the descriptor's number means next
  ends_ = true;
  ring(woken_.get());
  thread_.join();
  end_relays(true);
}

void Inspection::listen() {
  static std::atomic<unsigned> number{0};
  listener_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::uint64_t unknown = 0;  // makes a name that nobody can take before the socket has it
  random_bytes(std::as_writable_bytes(std::span(&unknown, 1)));
  // The first byte stays 0, so that the name has no file and is gone with the socket.
  const int length =
      std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "bps_rdma-%u-%d-%llu-%u-%016llx", ::geteuid(),
                    ::getpid(), pid_namespace(), number.fetch_add(1), static_cast<unsigned long long>(unknown));
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
  if (!listener_ || ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(listener_.get(), kBacklog) != 0) {
    throw_errno("cannot listen on a local socket");
  }
}

void Inspection::ask(const van::Question& question) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable() || questions_.size() >= kMostQuestions) return;
  questions_.push_back(question);
  ring(woken_.get());
}

void Inspection::note_failure(Failure failure) {
  if (source_.dump_dir.empty() || !thread_.joinable()) return;
  if (!failed_[static_cast<std::size_t>(failure)].exchange(true)) ring(woken_.get());
}

void Inspection::write_files() {
  for (std::size_t i = 0; i < kFailures; ++i) {
    if (failed_[i].exchange(false)) write_file(static_cast<Failure>(i));
  }
}

// Writes one file for each process. Many operations may fail for one cause. But what a server saw, and what the worker
// of the same process says a moment later, both deserve a file.
void Inspection::write_file(Failure failure) {
  const auto now = Clock::now();
  Clock::time_point& next = next_file_[static_cast<std::size_t>(failure)];
  if (now < next) return;
  next = now + kBetweenFiles;
  const std::string text = source_.report(true) + "\n";
  try {
    const FileName name = split_path(source_.dump_dir + "/bps-" + host_name() + "-" + std::to_string(pid_namespace()) +
                                     "-" + std::to_string(::getpid()) + ".json");
    const Fd folder = open_folder(name.folder);
    NewFile file(folder.get(), name, 0600);
    file.write(text);
    file.replace();
  } catch (const Error& error) {
    log_warning(std::string(error.what()) + "; check BPS_DUMP_DIR");
  }
}

void Inspection::run() {
  name_thread("bps-inspect");
  while (!ends_) {
    pollfd waits[] = {{signalled_.get(), POLLIN, 0}, {woken_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    if (::poll(waits, std::size(waits), -1) < 0 && errno != EINTR) return;
    try {
      const bool ends = take_rings(woken_.get()) && ends_;
      write_files();  // comes also at the end, which may have come because of the failure
      if (ends) return;
      answer_questions();
      if (take_rings(signalled_.get())) {
        const std::string text = "bps DUMP " + source_.report(false) + "\n";
        (void)std::fwrite(text.data(), 1, text.size(), stderr);
      }
      if ((waits[2].revents & POLLIN) != 0) answer_client();
    } catch (const std::exception& error) {
      log_warning(std::string("this process could not tell what it does: ") + error.what());
    }
  }
}

void Inspection::answer_questions() {
  std::vector<van::Question> asked;
  {
    const std::lock_guard lock(mutex_);
    asked.swap(questions_);
  }
  for (const van::Question& question : asked) source_.reply({question.number, source_.report(question.stacks)});
}

void Inspection::answer_client() {
  Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client || !is_same_user(client.get())) return;
  (void)::setsockopt(client.get(), SOL_SOCKET, SO_RCVTIMEO, &kClientPatience, sizeof kClientPatience);
  (void)::setsockopt(client.get(), SOL_SOCKET, SO_SNDTIMEO, &kClientPatience, sizeof kClientPatience);
  char line[32] = {};
  const ssize_t size = ::recv(client.get(), line, sizeof line, 0);
  const std::string_view request(line, size > 0 ? static_cast<std::size_t>(size) : 0);
  const bool stacks = request.ends_with(" stacks\n");
  if (request == "report\n" || request == "report stacks\n") return send_all(client.get(), source_.report(stacks));
  if (request == "job\n" || request == "job stacks\n") answer_about_job(std::move(client), stacks);
}

void Inspection::answer_about_job(Fd client, bool stacks) {
  const auto refuse = [](const Fd& whom, const std::string& why) {
    send_all(whom.get(), JsonObject().add("error", why).end());
  };
  end_relays(false);
  if (relays_.size() >= kMostRelays) return refuse(client, "this process is asking the scheduler for others already");
  const auto shared = std::make_shared<Fd>(std::move(client));
  Relay& relay = relays_.emplace_back();
  relay.thread = start_thread([this, shared, stacks, refuse, &relay] {
    try {
      send_all(shared->get(), source_.job(stacks));
    } catch (const Error& error) {
      refuse(*shared, error.what());
    }
    relay.over = true;
  });
}

void Inspection::end_relays(bool all) {
  std::erase_if(relays_, [all](Relay& relay) {
    if (!all && !relay.over) return false;
    if (relay.thread.joinable()) relay.thread.join();
    return true;
  });
}

void CurrentInspection::begin(Inspection::Source source) {
  auto begun = std::make_unique<Inspection>(std::move(source));
  const std::lock_guard lock(mutex_);
  inspection_ = std::move(begun);
}

void CurrentInspection::end() {
  std::unique_ptr<Inspection> ended;  // is destroyed after the lock is gone
  const std::lock_guard lock(mutex_);
  ended.swap(inspection_);
}

void CurrentInspection::ask(const van::Question& question) {
  const std::lock_guard lock(mutex_);
  if (inspection_) inspection_->ask(question);
}

void CurrentInspection::note_failure(Failure failure) {
  const std::lock_guard lock(mutex_);
  if (inspection_) inspection_->note_failure(failure);
}

}  // namespace bps::node
