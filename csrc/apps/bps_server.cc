// SPDX-License-Identifier: Apache-2.0
// bps-server: sums gradients for the workers of one job, on a spare host or on the cores of a DPU. Needs no Python.
#include <getopt.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/settings.h"
#include "node/process.h"

namespace {

void usage() {
  std::puts(
      "usage: bps-server [--rank N]\n"
      "  Serves one job and ends with it. Reads DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, "
      "DMLC_PS_ROOT_PORT,\n"
      "  BYTEPS_SERVER_ENGINE_THREAD and the BPS_* settings (`bps config` lists them all).\n"
      "  --rank N     take this server rank; default: any free one\n"
      "  --version    print the version and exit");
}

int run(std::int32_t rank) {
  const bps::Settings settings = bps::SettingValues().parse();
  bps::node::Startup startup = bps::node::startup_from(settings.job);
  startup.server_rank = rank;
  auto process = bps::node::Process::start(settings, startup);
  // A signal ends the process at once; the workers learn of it from the scheduler, as they would of a crash.
  bool well = process->wait_for_end();
  while (process->view_ended()) {
    process = bps::node::Process::renew(*process);
    well = process->wait_for_end();
  }
  process->shutdown(1);
  if (!well) std::fputs("bps-server: the job ended early: a member was lost\n", stderr);
  return well ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const option options[] = {{"rank", required_argument, nullptr, 'r'},
                            {"version", no_argument, nullptr, 'v'},
                            {"help", no_argument, nullptr, 'h'},
                            {nullptr, 0, nullptr, 0}};
  std::int32_t rank = bps::van::kAnyRank;
  for (int got; (got = ::getopt_long(argc, argv, "", options, nullptr)) != -1;) {
    switch (got) {
      case 'r': rank = std::atoi(optarg); break;
      case 'v': std::puts("bps-server " BPS_VERSION); return 0;
      case 'h': usage(); return 0;
      default: usage(); return 2;
    }
  }
  try {
    return run(rank);
  } catch (const bps::Error& error) {
    std::fprintf(stderr, "error: %s\nhint: %s\n", error.what(), error.hint().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}
