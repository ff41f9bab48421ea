// SPDX-License-Identifier: Apache-2.0
// Grants the landing slots of one worker session, as credits.
//
// A worker may write only into slots that it was granted, and each grant is good for one push. The window grants a slot
// again as soon as its bytes have been consumed, and notices when the worker has filled its last one. It announces
// grants of large slots at the loop's next step. Those of small slots wait until they are half of what is free, because
// a message for each of them would cost as much as its push. One thread uses it. Errors: open() and grant_overflow()
// may grow the pool, so they throw and must not be called on the data path. The rest may be.
#pragma once

#include <cstdint>
#include <vector>

#include "server/slot_pool.h"
#include "tensor/control_messages.h"
#include "transport/control_paths.h"

namespace bps::server {

// Says which messages sessions of a server loop have left for its next step().
struct SendsDue {
  bool answers = false;
  bool credits = false;
  bool commits = false;
};

class SlotWindow {
 public:
  SlotWindow(SlotPool& pool, const transport::Transport& transport, SendsDue& sends_due, std::uint32_t epoch)
      : pool_(pool), transport_(transport), sends_due_(sends_due), epoch_(epoch) {}
  SlotWindow(const SlotWindow&) = delete;
  SlotWindow& operator=(const SlotWindow&) = delete;

  // Grants the first slots: at most `large_slots` for pushes of up to `largest_payload` bytes, and small ones. Both are
  // fewer if they would not fit into `memory` bytes, but never none; 0 sets no limit.
  void open(std::uint64_t largest_payload, std::uint32_t large_slots, std::uint64_t memory);
  // To be called when the worker is lost and can write no more. Its slots go back to the pool, those in use when they
  // are released.
  void close();

  // To be called when the worker begins to write `where` into `slot`. Returns false if it may not: it was not granted
  // that slot, has filled it, or is filling it by another connection. The bytes of a second write could arrive when
  // those of the first one have been consumed, and the slot is perhaps another worker's. (Transports that write past
  // this process do not ask, and cannot be kept from that.)
  bool begin_fill(Slot& slot, const transport::DataEndpoint& from, const transport::RemoteSpan& where);
  // To be called when the worker says that it has filled `slot`. Returns false, and changes nothing, if it was not
  // granted that slot, or another connection is filling it.
  bool fill(Slot& slot, const transport::DataEndpoint& from);
  // Grants a slot whose bytes have been consumed to its worker again, or gives it back to its pool.
  static void release(Slot* slot, SlotPool& pool);

  // Returns true when the worker holds no slot of the size of `slot`, which it filled last, and no large one either.
  bool has_run_out(const Slot& slot) const;
  // Returns true when the worker may be unable to push. It sends in an order of its own, so a large partition that
  // lacks a slot also holds up the small ones behind it. So free small slots count only if all its partitions are
  // small.
  bool is_starved() const;
  // Counts the grants that have not been announced.
  std::size_t untold() const { return std::size_t{small_.untold} + large_.untold; }
  // Grants one slot beyond the window. It goes back to the pool once it has been used.
  void grant_overflow();

  // Announces what was granted since the last announcement, in one message unless the grants are too many for one. Does
  // nothing while the worker has enough.
  void send_credits(transport::ControlPaths& control);

 private:
  static constexpr std::uint64_t kSmallPayload = tensor::kSmallSlot - transport::kMaxHeader;

  // Counts slots of one size.
  struct Grants {
    std::uint32_t free = 0;    // granted, and not filled yet
    std::uint32_t untold = 0;  // of these the worker has not heard
  };
  void grant(Slot* slot);
  void note_starved();
  void note_due() {
    if (is_due()) sends_due_.credits = true;
  }
  bool is_due() const {
    return large_.untold > 0 || (small_.untold > 0 && std::uint64_t{2} * small_.untold >= small_.free);
  }
  Grants& of_size(const Slot& slot) { return tensor::is_small_slot(slot.capacity) ? small_ : large_; }

  SlotPool& pool_;
  const transport::Transport& transport_;  // the transport by which the worker writes
  SendsDue& sends_due_;
  const std::uint32_t epoch_;
  bool open_ = false;
  bool starved_ = false;  // as the pool counts it
  std::uint64_t largest_payload_ = 0;
  Grants small_;
  Grants large_;
  tensor::Credits credits_;  // for the next message
};

inline bool SlotWindow::fill(Slot& slot, const transport::DataEndpoint& from) {
  if (slot.window != this || !slot.granted || (slot.filled_by != nullptr && slot.filled_by != &from)) return false;
  slot.granted = false;
  slot.filled_by = nullptr;
  --of_size(slot).free;
  note_starved();
  note_due();
  return true;
}

inline bool SlotWindow::is_starved() const {
  return open_ && large_.free == 0 && (largest_payload_ > kSmallPayload || small_.free == 0);
}

inline void SlotWindow::note_starved() {
  const bool now = is_starved();
  if (now == starved_) return;
  starved_ = now;
  pool_.starved_windows += now ? 1U : ~0U;
}

inline bool SlotWindow::has_run_out(const Slot& slot) const {
  return large_.free == 0 && (small_.free == 0 || !tensor::is_small_slot(slot.capacity));
}

}  // namespace bps::server
