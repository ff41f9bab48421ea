// SPDX-License-Identifier: Apache-2.0
// Holds the registered memory of one server loop, cut into slots of a few sizes: landing slots for pushes, and room for
// results.
//
// Slots are carved from slabs. A slab is registered once with every transport whose peers write into slots, and it is
// never given back to the system: the pool grows to the largest number of slots in use at one time and stays there.
// Pages of a slot that nobody has touched cost nothing. One thread uses it. Errors: reserve() throws; take() and
// give_back() neither throw nor allocate, so the data path may call them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "transport/reactor.h"
#include "transport/transport.h"

namespace bps::server {

class SlotWindow;

struct Slot {
  std::uint32_t number = 0;   // the immediate of a write that lands here
  std::byte* data = nullptr;  // the header, then the payload
  std::uint64_t capacity = 0;
  std::uint64_t offset = 0;                                    // in its slab
  const std::vector<transport::RegionPtr>* regions = nullptr;  // of its slab, one per transport of the pool
  SlotWindow* window = nullptr;                                // the window it belongs to; null: it is the pool's
  bool granted = false;                                        // the worker may fill it now
  bool overflow = false;                                       // it goes back to the pool once it has been used
  const transport::DataEndpoint* filled_by = nullptr;          // the connection by which its bytes are arriving

  std::byte* payload() const { return data + transport::kMaxHeader; }
};

class SlotPool {
 public:
  // The thread of `reactor` uses the pool. Its watchdog does not mind how long new memory takes.
  explicit SlotPool(std::vector<transport::Transport*> transports, transport::Reactor* reactor = nullptr)
      : transports_(std::move(transports)), reactor_(reactor) {}

  // Makes sure that `count` slots for a header and `payload` bytes are free. May map and register memory.
  void reserve(std::uint64_t payload, std::size_t count);
  // Returns a free slot for a header and `payload` bytes, or nullptr when none is free.
  Slot* take(std::uint64_t payload);
  void give_back(Slot* slot);
  // Takes back the slots that the owner of `window` was granted and has not filled.
  void reclaim(const SlotWindow& window);

  // Lets another connection fill what the closed one was filling.
  void stop_fill(const transport::DataEndpoint& closed);

  Slot* by_number(std::uint32_t number) { return number < slots_.size() ? &slots_[number] : nullptr; }
  // Returns true where the peers of this transport write into slots.
  bool serves(const transport::Transport& transport) const;
  // Returns the slot's region as `transport`, which the pool serves, knows it.
  const transport::Region& region(const Slot& slot, const transport::Transport& transport) const;
  std::uint64_t bytes() const { return bytes_; }
  // Counts the starved windows into this pool, which spares most searches for one.
  std::uint32_t starved_windows = 0;

 private:
  struct SizeClass {
    std::uint64_t capacity;
    std::size_t slots = 0;
    std::vector<Slot*> free;  // has room for all slots of the class
  };
  struct Slab {
    std::shared_ptr<std::byte> memory;
    std::vector<transport::RegionPtr> regions;
  };
  SizeClass* find(std::uint64_t capacity);
  void grow(SizeClass& size_class);

  std::vector<transport::Transport*> transports_;
  transport::Reactor* reactor_;
  std::vector<SizeClass> classes_;
  std::deque<Slab> slabs_;  // std::deque: addresses stay
  std::deque<Slot> slots_;
  std::uint64_t bytes_ = 0;
};

}  // namespace bps::server
