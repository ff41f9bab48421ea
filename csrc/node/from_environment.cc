#include "node/from_environment.h"

#include "core/error.h"

namespace bps::node {

Startup startup_from_environment(const Config& config) {
  Startup startup;
  startup.workers = static_cast<std::uint32_t>(config.integer("BPS_NUM_WORKERS", 1, 65535));
  // BytePS counts machines in DMLC_NUM_WORKER; every local process is a worker.
  if (!config.text("BPS_LOCAL_SIZE").empty()) {
    startup.workers *= static_cast<std::uint32_t>(config.integer("BPS_LOCAL_SIZE", 1, 4096));
  }
  startup.servers = static_cast<std::uint32_t>(config.integer("BPS_NUM_SERVERS", 1, 65535));
  startup.scheduler_host = config.text("BPS_ROOT_URI");
  startup.scheduler_ports = {static_cast<std::uint16_t>(config.integer("BPS_ROOT_PORT", 1, 65535))};
  startup.job = config.text("BPS_JOB_ID");
  startup.secret = config.text("BPS_SECRET");
  return startup;
}

}  // namespace bps::node
