// SPDX-License-Identifier: Apache-2.0
// The process of a server that a pool has started, or that an earlier pool of this port has left.
//
// Such a process says in its environment whose it is, which the kernel shows to this user and root alone. So a pool
// that starts finds the servers of the one before, without a file that could be wrong. The process has a session of its
// own: it outlives its pool, and no Ctrl-C of a terminal reaches it.
//
// Threading: one thread. Errors: start() throws kTransport.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pool/share.h"

namespace bps::pool {

// The orders for the process, which a later pool reads as well.
struct Assignment {
  std::string pool;  // see name_of_pool()
  std::string user;
  std::string job;
  Share share;
  std::vector<int> cpus;   // that it may run on
  std::uint32_t seat = 0;  // its number among the servers of the pool, from 0

  // One line; a user name has no blanks, and the name of a job comes last.
  std::string to_text() const;
  static std::optional<Assignment> from_text(const std::string& text);
};

// Tells pools of one user and machine apart: by port and address, and by the network that they are in.
std::string name_of_pool(const std::string& address, std::uint16_t port);

class ServerProcess {
 public:
  // Starts this program as a server, with the secret of the job on its standard input.
  static ServerProcess start(const Assignment& assignment, std::vector<std::string> environment,
                             const std::string& secret);
  struct Found;
  // Those of a pool of this name that run already.
  static std::vector<Found> find(const std::string& pool);

  int pid() const { return pid_; }
  // Returns how it has ended: "ended with status 1", "was killed by signal 9"; nothing while it runs.
  std::optional<std::string> look();
  void kill(int signal) const;
  // Return the bytes of its own memory, and the seconds that it has computed; 0 once it has ended.
  std::uint64_t memory() const;
  double cpu_seconds() const;

 private:
  ServerProcess(int pid, std::uint64_t begun, bool is_child) : pid_(pid), begun_(begun), is_child_(is_child) {}
  bool is_there() const;

  int pid_;
  std::uint64_t begun_;  // tells it from a later process of the same number
  bool is_child_;
};

struct ServerProcess::Found {
  ServerProcess process;
  Assignment assignment;
};

// The server's side, before it does anything else: keeps to the cores and to the memory of its assignment, and returns
// the secret. Throws kInvalidArgument where no pool has started this process.
std::string follow_assignment();

}  // namespace bps::pool
