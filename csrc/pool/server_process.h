// SPDX-License-Identifier: Apache-2.0
// Controls the process of a server that a pool has started, or that an earlier pool of this port has left.
//
// Such a process says in its environment whose it is, and the kernel shows that to this user and root alone. So a pool
// that starts finds the servers of the one before, without a file that could be wrong. The process has a session of its
// own: it outlives its pool, and no Ctrl-C of a terminal reaches it.
//
// It belongs to one thread. start() throws kTransport.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pool/share.h"

namespace bps::pool {

// Holds the orders for the process, which a later pool reads as well.
struct Assignment {
  std::string pool;  // see name_of_pool()
  std::string user;
  std::string job;
  Share share;
  std::vector<int> cpus;   // those that it may run on
  std::uint32_t seat = 0;  // its number among the servers of the pool, from 0

  // Writes them in one line. A user name has no blanks, and the name of a job comes last.
  std::string to_text() const;
  static std::optional<Assignment> from_text(const std::string& text);
};

// Returns a name that tells pools of one user and machine apart: by port and address, and by their network.
std::string name_of_pool(const std::string& address, std::uint16_t port);

class ServerProcess {
 public:
  // Starts this program as a server, with the secret of the job on its standard input.
  static ServerProcess start(const Assignment& assignment, std::vector<std::string> environment,
                             const std::string& secret);
  struct Found;
  // Finds the servers of a pool of this name that run already.
  static std::vector<Found> find(const std::string& pool);

  int pid() const { return pid_; }
  // Returns how it has ended: "ended with status 1", "was killed by signal 9"; nothing while it runs.
  std::optional<std::string> look();
  void kill(int signal) const;
  // These return the bytes of its own memory, and the seconds that it has computed; 0 once it has ended.
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

// Is called by the server before it does anything else: keeps to the cores and the memory of its assignment, and
// returns the secret. Throws kInvalidArgument where no pool has started this process.
std::string follow_assignment();

}  // namespace bps::pool
