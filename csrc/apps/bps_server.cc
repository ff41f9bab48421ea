// SPDX-License-Identifier: Apache-2.0
// Runs bps-server, which sums gradients for the workers of one job, on a spare host or on the cores of a DPU. It needs
// no Python.
#include <getopt.h>
#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "core/log.h"
#include "core/settings.h"
#include "core/unknown_settings.h"
#include "core/words.h"
#include "node/process.h"
#include "pool/key_file.h"
#include "pool/pool.h"
#include "pool/server_process.h"
#include "van/van.h"

namespace bps::apps::server {
namespace {

void usage() {
  std::puts(
      "usage: bps-server [--rank N] | --pool | --pool-key USER\n"
      "  Sums gradients for the workers of one job, and ends with the job. Example:\n"
      "    BPS_NUM_WORKERS=2 BPS_NUM_SERVERS=1 BPS_ROOT_URI=10.0.0.1 \\\n"
      "      BPS_ROOT_PORT=9010 BPS_SECRET_FILE=/etc/bps-secret bps-server\n"
      "\n"
      "options\n"
      "  --rank N     take this server rank; default: any free one\n"
      "  --pool       wait for jobs (bps run --pool), and start a server for each\n"
      "  --pool-key USER  print a new line for the file of keys, and exit\n"
      "  --help       print this and exit\n"
      "  --version    print the version and exit\n"
      "\n"
      "variables; the first four must be set, to the same values on all members\n"
      "  BPS_NUM_WORKERS    machines with workers\n"
      "  BPS_NUM_SERVERS    servers\n"
      "  BPS_ROOT_URI       host of the scheduler\n"
      "  BPS_ROOT_PORT      port of the scheduler\n"
      "  BPS_LOCAL_SIZE     workers per machine, where there are several\n"
      "  BPS_SECRET_FILE    file with the secret of the job, or BPS_SECRET; needed\n"
      "                     on several hosts\n"
      "  BPS_JOB_ID         name of the job, if the others have one\n"
      "  BPS_TRANSPORT      shm, tcp, rdma or auto\n"
      "  BPS_INTERFACE      network interfaces to use, as in eth0,eth1\n"
      "  BPS_SERVER_ENGINE_THREAD  threads that sum; default: one per core, at most 4\n"
      "  BPS_JOIN_TIMEOUT   seconds to wait for the other members\n"
      "  BPS_LOG_LEVEL      DEBUG, INFO, WARNING or ERROR\n"
      "\n"
      "variables of a pool\n"
      "  BPS_POOL_KEY_FILE  file with a line for each user who may ask\n"
      "  BPS_POOL_PORT      port to listen at; default: 9030\n"
      "  BPS_POOL_CORES, BPS_POOL_MEMORY, BPS_POOL_JOBS  what it gives to jobs\n"
      "  docs/settings.md and `bps config` list all of them, and BytePS's names.\n"
      "\n"
      "exit status\n"
      "  0  the job is over; or SIGTERM ended a pool\n"
      "  1  it could not start, or the job ended early\n"
      "  2  the command line is wrong");
}

// Returns what --rank says; kAnyRank where that is no rank.
std::int32_t rank_from(std::string_view text) {
  std::int32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  return error == std::errc() && end == text.data() + text.size() && rank >= 0 ? rank : van::kAnyRank;
}

// Ends the process at once; the workers learn of it from the scheduler, as they would of a crash. The kernel brings to
// process 1 of a container only signals with a handler. So there is one, and the default follows it. Where that does
// nothing, the exit status of a shell does.
void end_by(int signal_number) {
  (void)::raise(signal_number);
  ::_exit(128 + signal_number);
}

void end_by_signals() {
  for (const int number : {SIGINT, SIGTERM}) {
    struct sigaction now{};
    if (::sigaction(number, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;  // who starts us ignores it
    struct sigaction ours{};
    ours.sa_handler = end_by;
    ours.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
    (void)::sigaction(number, &ours, nullptr);
  }
}

void say_why(node::Process& process) {
  const std::string why = process.van().end().why();
  if (!why.empty()) std::fprintf(stderr, "bps-server: %s\n", why.c_str());
}

// Runs the pool. The servers of its jobs are processes of their own, which go on when it ends.
int run_pool() {
  sigset_t taken;
  ::sigemptyset(&taken);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&taken, number);
  ::pthread_sigmask(SIG_BLOCK, &taken, nullptr);  // comes before any other thread starts
  const Settings settings = SettingValues().parse();
  set_log(settings.log_level, "pool");
  log_unknown_settings();
  pool::Pool served(settings);
  const pool::Limits& limits = served.jobs().limits();
  std::fprintf(stderr, "bps-server: pool on port %u: %s, %s and %s of memory\n", served.port(),
               counted(limits.jobs, "job").c_str(), counted(limits.all.cores, "core").c_str(),
               (std::to_string(limits.all.memory >> 20) + " MiB").c_str());
  return served.run() == SIGINT ? 128 + SIGINT : 0;
}

int run(SettingValues values, std::int32_t rank) {
  const Settings settings = values.parse();
  node::Startup startup = node::startup_from(settings.job);
  startup.server_rank = rank;
  std::fprintf(stderr, "bps-server: waiting for the scheduler at %s, port %u, and for %s and %s\n",
               startup.scheduler_host.c_str(), startup.scheduler_ports.front(),
               counted(startup.workers, "worker").c_str(), counted(startup.servers, "server").c_str());
  auto process = node::Process::start(settings, startup);
  std::fprintf(stderr, "bps-server: ready; this is %s\n", process->van().self().describe().c_str());
  bool well = process->van().wait_for_end();
  while (process->view_ended()) {
    const bool was_suspended = process->van().end().resume_patience_ms() > 0;
    if (was_suspended) say_why(*process);
    try {
      process = node::Process::renew(*process);
    } catch (const Error&) {  // perhaps because the job is over, no other view begins for this server
      well = process->van().wait_for_end();
      if (!well && process->van().end().so_far() != van::SessionEnd::How::kBadly) throw;
      say_why(*process);
      break;
    }
    const std::string self = process->van().self().describe();
    if (was_suspended) std::fprintf(stderr, "bps-server: ready again; this is %s\n", self.c_str());
    well = process->van().wait_for_end();
  }
  process->shutdown(1);
  if (!well) std::fputs("bps-server: the job ended early: a member was lost\n", stderr);
  return well ? 0 : 1;
}

}  // namespace

int run(int argc, char** argv) {
  const option options[] = {{"rank", required_argument, nullptr, 'r'},
                            {"pool", no_argument, nullptr, 'p'},
                            {"pool-key", required_argument, nullptr, 'k'},
                            {"pooled", no_argument, nullptr, 'o'},  // is what a pool passes to its servers
                            {"version", no_argument, nullptr, 'v'},
                            {"help", no_argument, nullptr, 'h'},
                            {nullptr, 0, nullptr, 0}};
  std::int32_t rank = van::kAnyRank;
  enum class As : std::uint8_t { kServer, kPool, kPooled, kKeyMaker } as{};
  std::string user;
  for (int got; (got = ::getopt_long(argc, argv, "", options, nullptr)) != -1;) {
    switch (got) {
      case 'r':
        rank = rank_from(optarg);
        if (rank != van::kAnyRank) break;
        std::fprintf(stderr, "error: --rank %s is not a server rank\nhint: pass a number from 0\n", optarg);
        return 2;
      case 'p': as = As::kPool; break;
      case 'o': as = As::kPooled; break;
      case 'k':
        as = As::kKeyMaker;
        user = optarg;
        break;
      case 'v': std::puts("bps-server " BPS_VERSION); return 0;
      case 'h': usage(); return 0;
      default: usage(); return 2;
    }
  }
  if (optind < argc) {
    std::fprintf(stderr, "error: '%s' is not an option\nhint: see bps-server --help\n", argv[optind]);
    return 2;
  }
  try {
    if (as == As::kKeyMaker) {
      std::puts(pool::new_line(user).c_str());
      return 0;
    }
    if (as == As::kPool) return run_pool();
    end_by_signals();
    SettingValues values;
    if (as == As::kPooled) values.set("BPS_SECRET", pool::follow_assignment(), "argument");
    return run(std::move(values), rank);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\nhint: %s\n", error.what(), error.hint().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}

}  // namespace bps::apps::server
