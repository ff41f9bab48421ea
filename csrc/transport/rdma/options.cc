// SPDX-License-Identifier: Apache-2.0
#include "transport/rails.h"
#include "transport/rdma/rail.h"

namespace bps::transport::rdma {
namespace {

CallersMemory rule_for_memory(std::string_view setting) {
  if (setting == "staged") return CallersMemory::kStaged;
  return setting == "trusted" ? CallersMemory::kInPlace : CallersMemory::kWatched;
}

}  // namespace

RdmaOptions RdmaOptions::from(const RdmaSettings& settings) {
  return {.hca = HcaFilter::parse(settings.hca),
          .gid_index = settings.gid_index,
          .traffic_class = settings.traffic_class,
          .service_level = settings.service_level,
          .pkey_index = settings.pkey_index,
          .timeout = settings.timeout,
          .retry_count = settings.retry_count,
          .data_queue_pairs = settings.data_queue_pairs,
          .callers_memory = rule_for_memory(settings.callers_memory),
          .verbs_library = settings.verbs_library};
}

std::string describe(const Rail& rail) {
  const std::string speed = rail.speed == 0 ? "" : " (" + speed_in_words(rail.speed) + ")";
  return rail.device + " port " + std::to_string(rail.port) + speed + ", GID " + std::to_string(rail.gid_index) + ": " +
         rail.reason;
}

}  // namespace bps::transport::rdma
