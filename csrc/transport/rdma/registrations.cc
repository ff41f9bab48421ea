// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/registrations.h"

namespace bps::transport::rdma {

Registration* Registrations::add(std::span<std::byte> bytes) {
  if (context_ == nullptr) {
    throw Error(ErrorCode::kTransport, "cannot register memory: the RDMA device is gone",
                "restart the job from its last checkpoint");
  }
  auto made = std::make_unique<Registration>(Registration{context_->register_for_peers(bytes)});
  all_.insert(made.get());
  return made.release();
}

void Registrations::release(Registration* registration) {
  if (--registration->users > 0) return;
  all_.erase(registration);
  delete registration;
}

void Registrations::drop_all() {
  context_ = nullptr;
  for (Registration* registration : all_) registration->memory.reset();
}

RdmaRegion::RdmaRegion(std::span<std::byte> bytes, std::shared_ptr<Registrations> registrations)
    : Region(bytes),
      registrations_(std::move(registrations)),
      registration_(registrations_->add(bytes)),
      local_key_(registration_->memory->lkey) {
  key_ = registration_->memory->rkey;
  origin_ = reinterpret_cast<std::uint64_t>(bytes.data());
}

}  // namespace bps::transport::rdma
