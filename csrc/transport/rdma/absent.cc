// SPDX-License-Identifier: Apache-2.0
// Stands for RDMA in a build that was made with -DBPS_RDMA=OFF: it says that there is none.
#include "transport/rdma/rdma.h"

namespace bps::transport::rdma {
namespace {

constexpr const char* kWhyNot = "this build has no RDMA";
constexpr const char* kHint =
    "install libibverbs-dev and librdmacm-dev (rdma-core-devel elsewhere), build again without -DBPS_RDMA=OFF";

}  // namespace

RdmaRails find_rdma(const RdmaOptions&, GidWish) {
  return {{}, kWhyNot, kHint};
}

std::unique_ptr<Transport> make_rdma_transport(EventLoop&, const Credentials&, Counters&, const std::vector<Rail>&,
                                               const RdmaOptions&) {
  throw Error(ErrorCode::kUnreachable, kWhyNot, kHint);
}

std::unique_ptr<RdmaListener> open_rdma_listener(EventLoop&, const Credentials&, const std::vector<Rail>&,
                                                 const PortRange&, RdmaListener::Enter) {
  throw Error(ErrorCode::kUnreachable, kWhyNot, kHint);
}

RdmaReport rdma_report() {
  RdmaReport report;
  report.why_not = kWhyNot;
  report.hint = kHint;
  return report;
}

}  // namespace bps::transport::rdma
