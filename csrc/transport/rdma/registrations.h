// SPDX-License-Identifier: Apache-2.0
// The memory of this process that one context knows.
//
// A registration lives as long as its Region, and as the writes from it that are unfinished: until a write is
// acknowledged the device may have to send it again, and the answer that told us that the bytes have arrived can be
// faster than the acknowledgement. When the device goes, all go. Threading: the loop's.
#pragma once

#include <memory>
#include <unordered_set>

#include "transport/rdma/context.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

struct Registration {
  Mr memory;
  std::uint32_t users = 1;  // its region, and each unfinished write
};

class Registrations {
 public:
  explicit Registrations(Context& context) : context_(&context) {}
  ~Registrations() { drop_all(); }

  Registration* add(std::span<std::byte> bytes);
  void release(Registration* registration);
  // The device goes: gives all memory back. Regions that are left name nothing any more.
  void drop_all();
  std::size_t size() const { return all_.size(); }

 private:
  Context* context_;  // null once the device is gone
  std::unordered_set<Registration*> all_;
};

class RdmaRegion final : public Region {
 public:
  RdmaRegion(std::span<std::byte> bytes, std::shared_ptr<Registrations> registrations);
  ~RdmaRegion() override { registrations_->release(registration_); }

  std::uint32_t local_key() const { return local_key_; }
  Registration* registration() const { return registration_; }

 private:
  std::shared_ptr<Registrations> registrations_;  // may outlive the transport
  Registration* registration_;
  std::uint32_t local_key_;
};

}  // namespace bps::transport::rdma
