#include "transport/rdma/rail.h"

namespace bps::transport::rdma {
namespace {

std::optional<unsigned> optional_number(const Config& config, const char* name, std::int64_t highest) {
  const std::int64_t number = config.integer(name, -1, highest);
  if (number < 0) return std::nullopt;
  return static_cast<unsigned>(number);
}

}  // namespace

RdmaOptions RdmaOptions::from(const Config& config) {
  RdmaOptions options;
  options.hca = HcaFilter::parse(config.text("BPS_RDMA_HCA"));
  options.gid_index = optional_number(config, "BPS_RDMA_GID_INDEX", 65535);
  options.traffic_class = optional_number(config, "BPS_RDMA_TC", 255);
  options.service_level = optional_number(config, "BPS_RDMA_SL", 15);
  options.pkey_index = optional_number(config, "BPS_RDMA_PKEY", 65535);
  options.timeout = static_cast<unsigned>(config.integer("BPS_RDMA_TIMEOUT", 1, 31));
  options.retry_count = static_cast<unsigned>(config.integer("BPS_RDMA_RETRY_CNT", 0, 7));
  options.data_queue_pairs = static_cast<unsigned>(config.integer("BPS_RDMA_QPS", 1, 16));
  return options;
}

}  // namespace bps::transport::rdma
