// SPDX-License-Identifier: Apache-2.0
// Answers people who ask what this process is doing, on a thread of its own, whatever its other threads do.
//
// There are three ways to ask: SIGUSR1, which shows the report on standard error; a local socket, for programs of the
// same user on this machine (`bps why`, `bps top`); and a Question of the scheduler. The socket has an abstract name,
// "bps_rdma-UID-PID-NAMESPACE-NUMBER-RANDOM", and lets in this user and root only. Another user cannot take that name
// before, but can have others of the form, so a client checks who listens. The client sends a line, and reads the reply
// until the end of the stream:
//
//   report          what this process does, as JSON
//   report stacks   the same, with where its threads are
//   job, job stacks what all members of the job do, which the scheduler asks: {"scheduler": ..., "members": [...]}
//
// The handler of SIGUSR1 is installed once, unless the program handles the signal already. It stays, and has no effect
// while no such object lives, or in a forked child. A handler that the program sets later replaces it.
//
// Any thread may use it. Without threads or descriptors nobody is answered, and a line in the log says so.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/fd.h"
#include "van/messages.h"

namespace bps::node {

// Names a failure that makes a process write what it knows.
enum class Failure : std::uint8_t {
  kOfOperation,  // a worker's
  kOfRound,      // a server's
};
constexpr std::size_t kFailures = 2;

class Inspection {
 public:
  // These are called on threads of the object.
  struct Source {
    std::function<std::string(bool stacks)> report;
    std::function<std::string(bool stacks)> job;  // may throw Error
    std::function<void(const van::Reply&)> reply;
    std::string dump_dir;  // where a report is written after a failure: BPS_DUMP_DIR; empty: nowhere
  };

  // The newest one of several objects gets the signal.
  explicit Inspection(Source source);
  // Waits for a reply that is under way, and writes what is still to be written.
  ~Inspection();
  Inspection(const Inspection&) = delete;
  Inspection& operator=(const Inspection&) = delete;

  // Any thread may call these; they return at once.
  void ask(const van::Question& question);
  void note_failure(Failure failure);

 private:
  void listen();
  void run();
  void answer_client();
  void answer_questions();
  void write_files();
  void write_file(Failure failure);
  void answer_about_job(Fd client, bool stacks);
  void end_relays(bool all);

  const Source source_;
  Fd signalled_;  // counts signals
  Fd woken_;      // counts questions, and the end
  Fd listener_;
  std::atomic<bool> ends_{false};
  std::array<std::atomic<bool>, kFailures> failed_{};
  std::array<Clock::time_point, kFailures> next_file_{};  // belongs to thread_
  std::mutex mutex_;
  std::vector<van::Question> questions_;  // guarded by mutex_
  // Asks the scheduler, which asks all members, so this process must be able to answer meanwhile.
  struct Relay {
    std::atomic<bool> over{false};
    std::thread thread;
  };
  std::list<Relay> relays_;  // belong to thread_
  std::thread thread_;
};

// Holds the inspection of a process, while it has one. Any thread may use it.
class CurrentInspection {
 public:
  void begin(Inspection::Source source);
  // Waits for a reply that is under way, and writes what is still to be written.
  void end();
  void ask(const van::Question& question);
  void note_failure(Failure failure);

 private:
  std::mutex mutex_;
  std::unique_ptr<Inspection> inspection_;  // guarded by mutex_
};

}  // namespace bps::node
