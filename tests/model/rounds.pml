// SPDX-License-Identifier: Apache-2.0
// Landing slots, rounds and cancelled operations: two workers, one server loop, two partitions that each worker pushes
// in an order of its own. docs/model.md explains it; `ci/test model` runs it.
//
// Data and control messages of a worker and the server travel by different channels, and overtake each other. A worker
// holds one slot; an operation may reach its deadline at any moment, as often as DEADLINES says, on each worker.
#ifndef DEADLINES
#define DEADLINES 1
#endif
#define W 2
#define P 2
#define AT(w, p) ((w) * P + (p))

mtype = { CREDIT, OVERFLOW, FAILED, ABORTED, ANSWERED };
mtype = { QUEUED, SENT, CANCELLING, OVER };

chan push[W] = [2] of { byte, bool };    // partition, and whether it lands in an overflow slot
chan cancel[W] = [2] of { byte };
chan answer[W] = [2] of { byte };        // a write into the memory of the caller
chan reply[W] = [6] of { mtype, byte };

// ---- Workers
mtype state[W * P] = QUEUED;
bool unread[W * P];                      // its push has not been read from the memory of the caller
bool aborted[W * P];                     // it will get no answer, and ends as soon as it has been read
bool never_sent[W * P];
bool has_result[W * P];
byte slots[W] = 1;
byte overflow_slots[W];

// ---- The server
bool pushed[W * P], answered[W * P], told[W * P], in_overflow[W * P];
bool opened[P], failed[P], summed[P];
byte granted[W] = 1;                     // slots that the worker holds, as the server knows it

inline end_of(w, p) {
  state[AT(w, p)] = OVER;
}

inline end_when_unread(w, p) {           // WorkerLoop::end_when_unread
  aborted[AT(w, p)] = true;
  if
  :: !unread[AT(w, p)] -> end_of(w, p)
  :: else
  fi
}

#define CAN_CANCEL(p) (deadlines > 0 && (state[AT(w, p)] == QUEUED || state[AT(w, p)] == SENT))

inline give_up(w, p) {                   // WorkerLoop::check_deadlines, send_cancel
  deadlines--;
  never_sent[AT(w, p)] = (state[AT(w, p)] == QUEUED);
  state[AT(w, p)] = CANCELLING;
  cancel[w] ! p
#ifdef BUG_RETURNS_BEFORE_ACKNOWLEDGED
  ; end_of(w, p)
#endif
}

proctype Worker(byte w; byte first) {
  byte p, next = first, deadlines = DEADLINES;
  bool in_overflow_slot;
end:
  do
  // Sender::push: in order, as long as there is a slot.
  :: d_step { next < P && state[AT(w, next)] == QUEUED && slots[w] + overflow_slots[w] > 0 ->
      in_overflow_slot = (slots[w] == 0);
      if
      :: in_overflow_slot -> overflow_slots[w]--
      :: else -> slots[w]--
      fi;
      state[AT(w, next)] = SENT;
      unread[AT(w, next)] = true;
      push[w] ! next, in_overflow_slot;
      next = (next == first -> 1 - first : P) }
  :: d_step { next < P && state[AT(w, next)] != QUEUED ->   // it was cancelled before
      next = (next == first -> 1 - first : P) }
  :: d_step { CAN_CANCEL(0) -> give_up(w, 0) }
  :: d_step { CAN_CANCEL(1) -> give_up(w, 1) }
  // WorkerLoop::on_answer: the bytes are in the caller's memory by now, whatever this worker thinks of it.
  :: d_step { answer[w] ? p ->
      assert(state[AT(w, p)] != OVER);
      if
      :: state[AT(w, p)] == SENT -> has_result[AT(w, p)] = true
      :: else
      fi;
      end_of(w, p) }
  :: d_step { reply[w] ? CREDIT, p -> slots[w]++ }
  :: d_step { reply[w] ? OVERFLOW, p -> overflow_slots[w]++ }
  :: d_step { reply[w] ? FAILED, p ->                        // on_push_failed
      if
      :: state[AT(w, p)] != OVER -> end_when_unread(w, p)
      :: else
      fi }
  :: d_step { reply[w] ? ABORTED, p ->                       // on_cancelled
      if
      :: state[AT(w, p)] != OVER -> end_when_unread(w, p)
      :: else
      fi }
  :: d_step { reply[w] ? ANSWERED, p ->                      // on_cancelled: the answer is on its way
      if
      :: state[AT(w, p)] != OVER && never_sent[AT(w, p)] -> end_when_unread(w, p)
      :: else
      fi }
  // on_written
  :: d_step { aborted[AT(w, 0)] && !unread[AT(w, 0)] && state[AT(w, 0)] != OVER -> end_of(w, 0) }
  :: d_step { aborted[AT(w, 1)] && !unread[AT(w, 1)] && state[AT(w, 1)] != OVER -> end_of(w, 1) }
  od
}

inline release(w, p) {                   // SlotWindow::release
  if
  :: in_overflow[AT(w, p)]               // back to the pool
  :: else -> granted[w]++; reply[w] ! CREDIT, 0
  fi
#ifdef BUG_SLOT_RELEASED_TWICE
  ; granted[w]++; reply[w] ! CREDIT, 0
#endif
}

// RoundEngine::waits_for_starved, grant_overflow
#define LACKS(w, p) (!pushed[AT(w, p)])
#define STARVED(w) (granted[w] == 0)
#define WAITS_FOR_STARVED(p) (opened[p] && !failed[p] && !summed[p] && (LACKS(0, p) || LACKS(1, p)) && \
                              (!LACKS(0, p) || STARVED(0)) && (!LACKS(1, p) || STARVED(1)))

inline grant_overflow(w, p) {
  if
  :: LACKS(w, p) -> granted[w]++; reply[w] ! OVERFLOW, 0
  :: else
  fi
}

inline sum(p) {                          // RoundEngine::sum, answer_all
#ifndef BUG_ONE_CONTRIBUTION_LESS
  assert(pushed[AT(0, p)] && pushed[AT(1, p)]);
#endif
  summed[p] = true;
  for (v : 0 .. W - 1) {
    if
    :: pushed[AT(v, p)] && !told[AT(v, p)] ->
       release(v, p);
       answered[AT(v, p)] = true;
       told[AT(v, p)] = true;
       answer[v] ! p
    :: else
    fi
  }
}

inline fail(p) {                         // RoundEngine::fail
  failed[p] = true;
  for (v : 0 .. W - 1) {
    if
    :: pushed[AT(v, p)] ->
       release(v, p);
       if
       :: !told[AT(v, p)] -> told[AT(v, p)] = true; reply[v] ! FAILED, p
       :: else
       fi
    :: else
    fi
  }
}

inline take(w) {                         // RoundEngine::on_write, admit, record
      assert(state[AT(w, p)] != OVER);     // the push is read from the caller's memory: that must not be over
      assert(granted[w] > 0);
      unread[AT(w, p)] = false;
      granted[w]--;
      in_overflow[AT(w, p)] = in_overflow_slot;
      if
  #ifdef BUG_NO_TOMBSTONE
      :: failed[p] && told[AT(0, p)] && told[AT(1, p)] -> // forgotten
         failed[p] = false; opened[p] = true; pushed[AT(w, p)] = true; told[AT(w, p)] = false
  #endif
      :: failed[p] || summed[p] ->         // refuse_failed, refuse_round
         release(w, p);
         told[AT(w, p)] = true;
         reply[w] ! FAILED, p
      :: else ->
         assert(!pushed[AT(w, p)]);
         opened[p] = true;
         pushed[AT(w, p)] = true;
         if
  #ifdef BUG_ONE_CONTRIBUTION_LESS
         :: true -> sum(p)
  #else
         :: pushed[AT(0, p)] && pushed[AT(1, p)] -> sum(p)
  #endif
         :: else
         fi
      fi;
      // The round of a sum has every contribution, whoever is told what.
      assert(!summed[p] || (pushed[AT(0, p)] && pushed[AT(1, p)]))
}

inline take_cancel(w) {                  // RoundEngine::cancel
  opened[p] = true;
  if
  :: answered[AT(w, p)] -> reply[w] ! ANSWERED, p
  :: !answered[AT(w, p)] && (summed[p] || failed[p]) -> told[AT(w, p)] = true; reply[w] ! ABORTED, p
  :: else -> told[AT(w, p)] = true; fail(p); reply[w] ! ABORTED, p
  fi
}

active proctype Server() {
  byte v, p;
  bool in_overflow_slot;
end:
  do
  :: d_step { push[0] ? p, in_overflow_slot -> take(0); p = 0; v = 0; in_overflow_slot = false }
  :: d_step { push[1] ? p, in_overflow_slot -> take(1); p = 0; v = 0; in_overflow_slot = false }
  :: d_step { cancel[0] ? p -> take_cancel(0); p = 0; v = 0 }
  :: d_step { cancel[1] ? p -> take_cancel(1); p = 0; v = 0 }
#ifndef BUG_NO_OVERFLOW
  // resume()
  :: d_step { WAITS_FOR_STARVED(0) -> grant_overflow(0, 0); grant_overflow(1, 0) }
  :: d_step { WAITS_FOR_STARVED(1) -> grant_overflow(0, 1); grant_overflow(1, 1) }
#endif
  od
}

// When nothing can happen any more, every call has returned, and every slot is where it was.
active proctype Monitor() {
  byte w, p;
  timeout ->
  for (w : 0 .. W - 1) {
    for (p : 0 .. P - 1) {
      assert(state[AT(w, p)] == OVER);
      assert(!has_result[AT(w, p)] || summed[p]);
      assert(has_result[AT(w, p)] || !summed[p] || DEADLINES > 0)
    }
    // A slot beyond the window stays with a worker that could push by one of its own after all, and serves its next push.
    assert(slots[w] == 1 && granted[w] == slots[w] + overflow_slots[w]);
    assert(empty(push[w]) && empty(cancel[w]) && empty(answer[w]) && empty(reply[w]))
  }
}

init {
  atomic {
    if
    :: run Worker(0, 0); run Worker(1, 0)  // in the same order
    :: run Worker(0, 0); run Worker(1, 1)  // in opposite orders
    fi
  }
}
