// SPDX-License-Identifier: Apache-2.0
// Runs bps-scheduler, the rendezvous of one job with separate servers. It needs no Python.
#include <arpa/inet.h>
#include <getopt.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/log.h"
#include "core/settings.h"
#include "core/threads.h"
#include "core/unknown_settings.h"
#include "core/words.h"
#include "node/job_secret.h"
#include "node/metrics_server.h"
#include "node/scheduler_metrics.h"
#include "node/startup.h"
#include "transport/listener.h"
#include "van/scheduler.h"
#include "van/scheduler_state.h"

namespace bps::apps::scheduler {
namespace {

// Is the exit status of a scheduler that was stopped for so long that members may have gone on without it. Another one
// may be started in its place.
constexpr int kSteppedDown = 75;  // EX_TEMPFAIL of sysexits.h

void usage() {
  std::puts(
      "usage: bps-scheduler [--workers N] [--servers N] [--address A] [--port P]\n"
      "  Brings the members of one job together, and ends with the job. Example:\n"
      "    BPS_NUM_WORKERS=2 BPS_NUM_SERVERS=1 BPS_ROOT_URI=10.0.0.1 \\\n"
      "      BPS_ROOT_PORT=9010 BPS_SECRET_FILE=/etc/bps-secret bps-scheduler\n"
      "\n"
      "options\n"
      "  --workers N  worker processes; default: as the variables say\n"
      "  --servers N  server processes; default: BPS_NUM_SERVERS\n"
      "  --address A  listen on this address only; default: BPS_ROOT_URI if it\n"
      "               is one of this machine's, else all\n"
      "  --port P     listen on this port; default: BPS_ROOT_PORT, or 9010\n"
      "  --help       print this and exit\n"
      "  --version    print the version and exit\n"
      "\n"
      "variables; the first two must be set, to the same values on all members\n"
      "  BPS_NUM_WORKERS    machines with workers\n"
      "  BPS_NUM_SERVERS    servers\n"
      "  BPS_ROOT_URI       the address at which the others look for this one\n"
      "  BPS_ROOT_PORT      its port\n"
      "  BPS_LOCAL_SIZE     workers per machine, where there are several\n"
      "  BPS_SECRET_FILE    file with the secret of the job, or BPS_SECRET; needed\n"
      "                     on several hosts\n"
      "  BPS_JOB_ID         name of the job, if the others have one\n"
      "  BPS_MIN_WORKERS    go on while that many workers are left\n"
      "  BPS_SCHEDULER_STATE  file that tells it, when started again, which job it had\n"
      "  BPS_JOIN_TIMEOUT   seconds to wait for the members; inf: no limit\n"
      "  BPS_RESUME_TIMEOUT seconds to wait for workers after suspend()\n"
      "  BPS_LOG_LEVEL      DEBUG, INFO, WARNING or ERROR\n"
      "  docs/settings.md and `bps config` list all of them, and BytePS's names.\n"
      "\n"
      "exit status\n"
      "  0    every worker has left, and nobody was lost; or SIGTERM ended it\n"
      "  1    it could not start, or the job ended early\n"
      "  2    the command line is wrong\n"
      "  75   it was stopped for so long that a job with BPS_MIN_WORKERS may have\n"
      "       gone on without it\n"
      "  130  Ctrl-C ended it\n"
      "  143  SIGTERM ended it, and not a job with BPS_MIN_WORKERS");
}

// Takes signals on a thread of its own: SIGINT and SIGTERM end the scheduler as its destructor would, SIGUSR1 shows on
// standard error what the job does.
class Signals {
 public:
  // Comes before any other thread starts: threads inherit what is blocked.
  Signals() {
    ::sigemptyset(&set_);
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) ::sigaddset(&set_, number);
    ::pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  void take_for(van::Scheduler& scheduler) {
    waiter_ = start_thread([this, &scheduler] {
      for (int number = 0; ::sigwait(&set_, &number) == 0 && !finished_;) {
        if (number == SIGUSR1) {
          std::fputs(("bps DUMP " + scheduler.dump() + "\n").c_str(), stderr);
          continue;
        }
        received_ = number;
        return scheduler.stop();
      }
    });
  }
  // Returns the signal that came, or 0.
  int finish() {
    finished_ = true;
    ::pthread_kill(waiter_.native_handle(), SIGUSR1);
    waiter_.join();
    return received_;
  }

 private:
  sigset_t set_;
  std::thread waiter_;
  std::atomic<bool> finished_{false};
  std::atomic<int> received_{0};
};

// Returns the address to listen on: that of DMLC_PS_ROOT_URI where it is one of this machine's, so that a job on
// 127.0.0.1 is closed to the network. All interfaces listen where it is a name (many machines map their own to a
// loopback address), or the address of a router in front of this machine.
std::string address_from(const SettingValues& values) {
  const auto& [host, source] = values.value("BPS_ROOT_URI");
  if (host == "localhost") return host;
  if (source == "default") return "";
  unsigned char parsed[sizeof(in6_addr)];
  if (::inet_pton(AF_INET, host.c_str(), parsed) != 1 && ::inet_pton(AF_INET6, host.c_str(), parsed) != 1) return "";
  try {
    transport::Listener::listen_tcp(host, 0);
    return host;
  } catch (const Error&) {
    return "";
  }
}

int run(SettingValues values, const std::string& address) {
  Signals signals;
  if (values.value("BPS_ROOT_PORT").text.empty()) values.set("BPS_ROOT_PORT", "9010", "default");
  const Settings settings = values.parse();
  set_log(settings.log_level, "scheduler");
  log_unknown_settings();
  const node::Startup startup = node::startup_from(settings.job);
  const node::ProcessOptions parsed(settings, startup);
  const node::JobSecret secret = node::job_secret(settings.job, startup);
  if (!secret.warning.empty()) log_warning(secret.warning);
  van::SchedulerOptions options;
  options.address = address;
  if (address.empty()) options.address = secret.one_host ? startup.scheduler_host : address_from(values);
  options.ports = startup.scheduler_ports;
  options.workers = startup.workers;
  options.servers = startup.servers;
  options.heartbeat_timeout_s = settings.deadlines.heartbeat;
  options.join_timeout_s = settings.deadlines.join;
  options.ends_alone = true;
  options.resume_timeout_s = settings.deadlines.resume;
  options.cut = parsed.cut;
  options.terms = parsed.terms();
  options.is_outlived = settings.job.min_workers > 0;
  const std::string& state = settings.job.scheduler_state;
  van::KnownRun known;
  if (!state.empty()) known = van::run_from_state(state);
  options.run = known.run;
  options.on_lost = [](const std::string& why) { std::fprintf(stderr, "bps-scheduler: %s\n", why.c_str()); };
  options.on_suspended = [](const std::string& what) { std::fprintf(stderr, "bps-scheduler: %s\n", what.c_str()); };
  van::Scheduler scheduler(options, secret.credentials);
  std::fprintf(stderr, "bps-scheduler: waiting for %s and %s on port %u%s\n",
               counted(startup.workers, "worker").c_str(), counted(startup.servers, "server").c_str(), scheduler.port(),
               known.has_begun ? ", in the place of a scheduler that was lost" : "");
  const auto metrics = node::serve(settings.metrics, 0, [&scheduler] { return node::scheduler_families(scheduler); });
  signals.take_for(scheduler);
  const bool well = scheduler.wait();
  switch (signals.finish()) {
    // Launchers end the scheduler so. A job that can do so goes on, and who looks after it may start another one in its
    // place.
    case SIGTERM: return options.is_outlived && !well ? 128 + SIGTERM : 0;
    case SIGINT: return 128 + SIGINT;
    default: break;
  }
  if (scheduler.stepped_down()) return kSteppedDown;
  if (well && !state.empty()) van::forget_state(state);
  if (!well) std::fputs("bps-scheduler: the job ended early: members are missing or lost\n", stderr);
  return well ? 0 : 1;
}

}  // namespace

int run(int argc, char** argv) {
  const option options[] = {{"workers", required_argument, nullptr, 'w'},
                            {"servers", required_argument, nullptr, 's'},
                            {"address", required_argument, nullptr, 'a'},
                            {"port", required_argument, nullptr, 'p'},
                            {"version", no_argument, nullptr, 'v'},
                            {"help", no_argument, nullptr, 'h'},
                            {nullptr, 0, nullptr, 0}};
  try {
    SettingValues values;
    std::string address;
    for (int got; (got = ::getopt_long(argc, argv, "", options, nullptr)) != -1;) {
      switch (got) {
        case 'w':
          values.set("BPS_NUM_WORKERS", optarg, "argument");
          values.set("BPS_LOCAL_SIZE", "", "argument");
          break;
        case 's': values.set("BPS_NUM_SERVERS", optarg, "argument"); break;
        case 'a': address = optarg; break;
        case 'p': values.set("BPS_ROOT_PORT", optarg, "argument"); break;
        case 'v': std::puts("bps-scheduler " BPS_VERSION); return 0;
        case 'h': usage(); return 0;
        default: usage(); return 2;
      }
    }
    if (optind < argc) {
      std::fprintf(stderr, "error: '%s' is not an option\nhint: see bps-scheduler --help\n", argv[optind]);
      return 2;
    }
    return run(values, address);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\nhint: %s\n", error.what(), error.hint().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}

}  // namespace bps::apps::scheduler
