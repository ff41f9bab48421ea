// Registered memory of one server loop, in slots of a few sizes: landing slots for pushes, and room for results.
//
// Slots are carved from slabs that are registered once with every transport that needs it, and are never given back to
// the system: the pool grows to the largest number in use at one time and stays there. Pages of a slot that nobody has
// touched cost nothing. Threading: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace bps::server {

class WorkerSession;

struct Slot {
  std::uint32_t number = 0;   // the immediate of a write that lands here
  std::byte* data = nullptr;  // the header, then the payload
  std::uint64_t capacity = 0;
  std::uint64_t offset = 0;                                    // in its slab
  const std::vector<transport::RegionPtr>* regions = nullptr;  // of its slab, one per transport of the pool
  WorkerSession* landing_for = nullptr;                        // the session that may write here now, or null
  bool overflow = false;  // granted to break a circle of waits; goes back to the pool, not to the worker

  std::byte* payload() const { return data + transport::kMaxHeader; }
};

class SlotPool {
 public:
  explicit SlotPool(std::vector<transport::Transport*> transports) : transports_(std::move(transports)) {}

  // A slot that holds a header and `payload` bytes. Grows the pool when none is free.
  Slot* take(std::uint64_t payload);
  void give_back(Slot* slot);
  Slot* by_number(std::uint32_t number) { return number < slots_.size() ? &slots_[number] : nullptr; }
  // The slot's region as `transport` knows it.
  const transport::Region& region(const Slot& slot, const transport::Transport& transport) const;
  std::uint64_t bytes() const { return bytes_; }

 private:
  struct Class {
    std::uint64_t capacity;
    std::vector<Slot*> free;
  };
  struct Slab {
    std::shared_ptr<std::byte> memory;
    std::vector<transport::RegionPtr> regions;
  };
  void grow(Class& size_class);

  std::vector<transport::Transport*> transports_;
  std::vector<Class> classes_;
  std::deque<Slab> slabs_;  // deques: addresses stay
  std::deque<Slot> slots_;
  std::uint64_t bytes_ = 0;
};

}  // namespace bps::server
