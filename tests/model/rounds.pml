// SPDX-License-Identifier: Apache-2.0
// Landing slots, rounds and cancelled operations: two workers, one server loop, two partitions that each worker pushes
// in an order of its own. docs/model.md explains it; `ci/test model` runs it.
//
// Writes, control messages and credits of a worker and the server travel by different channels and overtake each other;
// so do two writes. A worker holds one slot; an operation may reach its deadline at any moment, DEADLINES times in all.
#ifndef DEADLINES
#define DEADLINES 1
#endif
#define W 2
#define P 2
#define AT(w, p) ((w) * P + (p))
#include "trace.pml"

mtype = { CREDIT, OVERFLOW, FAILED, ABORTED, ANSWERED };
mtype = { QUEUED, SENT, CANCELLING, OVER };

// What tests/sim records, see model_rounds.cc: what happened, the worker, and the partition or the number of slots.
#define ACTION(what, w, p) (16 * (what) + 4 * (w) + (p))
#define PUSHES(w, p) ACTION(1, w, p)
#define TAKES_PUSH(w, p) ACTION(2, w, p)
#define CANCELS(w, p) ACTION(3, w, p)
#define TAKES_CANCEL(w, p) ACTION(4, w, p)
#define HEARS_ANSWER(w, p) ACTION(5, w, p)
#define HEARS_CREDIT(w) ACTION(6, w, 0)
#define HEARS_FAILED(w, p) ACTION(7, w, p)
#define HEARS_ABORTED(w, p) ACTION(8, w, p)
#define HEARS_ANSWERED(w, p) ACTION(9, w, p)
#define COMPLETES(w, p) ACTION(10, w, p)
#define GIVES_UP(w, p) ACTION(11, w, p)
#define SUMS(p) ACTION(12, 0, p)
#define HOLDS(w, slots) ACTION(13, w, slots)

chan push[W] = [2] of { byte, bool };    // partition, and whether it lands in an overflow slot
chan cancel[W] = [2] of { byte };
chan answer[W] = [2] of { byte };        // a write into the memory of the caller
chan reply[W] = [4] of { mtype, byte };
chan credit[W] = [6] of { mtype };       // announced at the end of a server loop's step

// ---- Workers
mtype state[W * P] = QUEUED;
bool unread[W * P];                      // as far as it knows, its push is not read from the memory of the caller yet
bool aborted[W * P];                     // it will get no answer, and ends as soon as it has been read
bool never_sent[W * P];
bool has_result[W * P];
byte slots[W] = 1;
byte deadlines = DEADLINES;
byte overflow_slots[W];

// ---- The server
bool pushed[W * P], answered[W * P], told[W * P], in_overflow[W * P];
bool opened[P], failed[P], summed[P];
bool holds_result[P];                    // the slot of the first worker, until the answers have been written
byte granted[W] = 1;                     // slots that the worker holds, as the server knows it

inline end_of(w, p) {
  state[AT(w, p)] = OVER;
}

inline end_when_unread(w, p) {           // PartitionsInFlight::end_when_unread
  aborted[AT(w, p)] = true;
  if
  :: !unread[AT(w, p)] -> end_of(w, p)
  :: else
  fi
}

#define CAN_CANCEL(p) (deadlines > 0 && (state[AT(w, p)] == QUEUED || state[AT(w, p)] == SENT))

inline give_up(w, p) {                   // WorkerLoop::check_deadlines, Cancellation::send_cancel
  deadlines--;
  never_sent[AT(w, p)] = (state[AT(w, p)] == QUEUED);
  state[AT(w, p)] = CANCELLING;
  cancel[w] ! p
#ifdef BUG_RETURNS_BEFORE_ACKNOWLEDGED
  ; end_of(w, p)
#endif
}

inline take_aborted(w, p) {              // on_cancelled: no answer will come
  if
  :: state[AT(w, p)] != OVER -> end_when_unread(w, p)
  :: else
  fi
}

inline take_answer(w, p) {               // Receiver::on_answer: the bytes are in the caller's memory by now
  CHECK(state[AT(w, p)] != OVER);
  if
  :: state[AT(w, p)] == SENT -> has_result[AT(w, p)] = true
  :: else
  fi;
  unread[AT(w, p)] = false;
  end_of(w, p)
}

inline take_failed(w, p) {               // on_push_failed: cancels what is left of the operation
  if
  :: state[AT(w, p)] == SENT && unread[AT(w, p)] ->
     aborted[AT(w, p)] = true;
     state[AT(w, p)] = CANCELLING;
     cancel[w] ! p;
     FOLLOWED_BY(CANCELS(w, p))
  :: else -> take_aborted(w, p)
  fi
}

inline take_answered(w, p) {             // on_cancelled: the answer is on its way
  if
  :: state[AT(w, p)] != OVER && never_sent[AT(w, p)] -> end_when_unread(w, p)
  :: else
  fi
}

inline take_written(w, p) {              // on_written, before or after the server has taken the push
  CHECK(state[AT(w, p)] != OVER);        // it was read from the caller's memory, which must not be over
  unread[AT(w, p)] = false;
  if
  :: aborted[AT(w, p)] -> end_of(w, p)
  :: else
  fi
}

#define WORKER_STEPS(p) \
  :: d_step { NEXT(CANCELS(w, p)) CAN_CANCEL(p) -> TOOK; give_up(w, p) } \
  :: d_step { NEXT(HEARS_ANSWER(w, p)) answer[w] ?? [p] -> TOOK; answer[w] ?? p; take_answer(w, p) } \
  :: d_step { NEXT(HEARS_FAILED(w, p)) reply[w] ? [FAILED, p] -> TOOK; reply[w] ? FAILED, p; take_failed(w, p) } \
  :: d_step { NEXT(HEARS_ABORTED(w, p)) reply[w] ? [ABORTED, p] -> TOOK; reply[w] ? ABORTED, p; take_aborted(w, p) } \
  :: d_step { NEXT(HEARS_ANSWERED(w, p)) reply[w] ? [ANSWERED, p] -> TOOK; \
      reply[w] ? ANSWERED, p; take_answered(w, p) } \
  :: d_step { unread[AT(w, p)] -> take_written(w, p) }

inline send_push(w, is_overflow) {
  state[AT(w, next)] = SENT;
  unread[AT(w, next)] = true;
  push[w] ! next, is_overflow;
  next = (next == first -> 1 - first : P)
}

proctype Worker(byte w; byte first) {
  byte next = first;
end:
  do
  // Sender::push: in order, as long as there is a slot, and from any of them.
  :: d_step { NEXT(PUSHES(w, next)) next < P && state[AT(w, next)] == QUEUED && slots[w] > 0 -> TOOK;
      slots[w]--;
      send_push(w, false) }
  :: d_step { NEXT(PUSHES(w, next)) next < P && state[AT(w, next)] == QUEUED && overflow_slots[w] > 0 -> TOOK;
      overflow_slots[w]--;
      send_push(w, true) }
  :: d_step { next < P && state[AT(w, next)] != QUEUED ->   // it was cancelled before
      next = (next == first -> 1 - first : P) }
  WORKER_STEPS(0)
  WORKER_STEPS(1)
  :: d_step { NEXT(HEARS_CREDIT(w)) credit[w] ? [CREDIT] -> TOOK; credit[w] ? CREDIT; slots[w]++ }
  :: d_step { NEXT(HEARS_CREDIT(w)) credit[w] ? [OVERFLOW] -> TOOK; credit[w] ? OVERFLOW; overflow_slots[w]++ }
  od
}

inline release(w, p) {                   // SlotWindow::release
  if
  :: in_overflow[AT(w, p)]               // back to the pool
  :: else -> granted[w]++; credit[w] ! CREDIT
  fi
#ifdef BUG_SLOT_RELEASED_TWICE
  ; granted[w]++; credit[w] ! CREDIT
#endif
}

// RoundQueue::is_starved, provide
#define LACKS(w, p) (!pushed[AT(w, p)])
#define STARVED(w) (granted[w] == 0)
#define WAITS_FOR_STARVED(p) (opened[p] && !failed[p] && !summed[p] && (LACKS(0, p) || LACKS(1, p)) && \
                              (!LACKS(0, p) || STARVED(0)) && (!LACKS(1, p) || STARVED(1)))

inline grant_overflow(w, p) {
  if
  :: LACKS(w, p) -> granted[w]++; credit[w] ! OVERFLOW
  :: else
  fi
}

inline sum(p) {                          // RoundEngine::sum, RoundEnds::answer_all
#ifndef BUG_ONE_CONTRIBUTION_LESS
  CHECK(pushed[AT(0, p)] && pushed[AT(1, p)]);
#endif
  summed[p] = true;
  for (v : 0 .. W - 1) {
    if
    :: pushed[AT(v, p)] && !told[AT(v, p)] ->
       if
       :: v == 0 -> holds_result[p] = true
       :: else -> release(v, p)
       fi;
       answered[AT(v, p)] = true;
       told[AT(v, p)] = true;
       answer[v] ! p
    :: else
    fi
  }
}

inline fail(p) {                         // RoundEnds::fail
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

inline take(w, p) {                      // RoundEngine::on_write, PushAdmission::admit
  CHECK(granted[w] > 0);
  granted[w]--;
  in_overflow[AT(w, p)] = in_overflow_slot;
  if
#ifdef BUG_NO_TOMBSTONE
  :: failed[p] && told[AT(0, p)] && told[AT(1, p)] -> // forgotten
     failed[p] = false; opened[p] = true; pushed[AT(w, p)] = true; told[AT(w, p)] = false
#endif
  :: failed[p] || summed[p] ->           // refuse_failed, refuse_round
     release(w, p);
     told[AT(w, p)] = true;
     reply[w] ! FAILED, p
  :: else ->
     CHECK(!pushed[AT(w, p)]);
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
  CHECK(!summed[p] || (pushed[AT(0, p)] && pushed[AT(1, p)]));
  v = 0; in_overflow_slot = false
}

// Of a round that has failed nothing is kept once all members have been told.
#define HAS_TOLD(w, p) (answered[AT(w, p)] || (failed[p] && told[AT(0, p)] && told[AT(1, p)]))
inline take_cancel(w, p) {               // RoundEngine::cancel
  opened[p] = true;
  if
  :: HAS_TOLD(w, p) -> reply[w] ! ANSWERED, p
  :: !HAS_TOLD(w, p) && (summed[p] || failed[p]) -> told[AT(w, p)] = true; reply[w] ! ABORTED, p
  :: else -> told[AT(w, p)] = true; fail(p); reply[w] ! ABORTED, p
  fi;
  v = 0
}

#define SERVER_STEPS(w, p) \
  :: d_step { NEXT(TAKES_PUSH(w, p)) push[w] ?? [p, in_overflow_slot] -> TOOK; \
      push[w] ?? p, in_overflow_slot; take(w, p) } \
  :: d_step { NEXT(TAKES_CANCEL(w, p)) cancel[w] ? [p] -> TOOK; cancel[w] ? p; take_cancel(w, p) }

active proctype Server() {
  byte v;
  bool in_overflow_slot;
end:
  do
  SERVER_STEPS(0, 0)
  SERVER_STEPS(0, 1)
  SERVER_STEPS(1, 0)
  SERVER_STEPS(1, 1)
  // on_written, close_if_over
  :: d_step { holds_result[0] -> holds_result[0] = false; release(0, 0) }
  :: d_step { holds_result[1] -> holds_result[1] = false; release(0, 1) }
#ifndef BUG_NO_OVERFLOW
  // resume()
  :: d_step { WAITS_FOR_STARVED(0) -> grant_overflow(0, 0); grant_overflow(1, 0) }
  :: d_step { WAITS_FOR_STARVED(1) -> grant_overflow(0, 1); grant_overflow(1, 1) }
#endif
  od
}

#ifdef TRACE
// What can be seen of the calls from outside, and where a recording has to end.
bool seen[W * P], seen_sum[P];
#define HAS_ENDED(w, p) state[AT(w, p)] == OVER && !seen[AT(w, p)]
#define OBSERVES(w, p) \
  :: d_step { NEXT(COMPLETES(w, p)) HAS_ENDED(w, p) && has_result[AT(w, p)] -> TOOK; seen[AT(w, p)] = true } \
  :: d_step { NEXT(GIVES_UP(w, p)) HAS_ENDED(w, p) && !has_result[AT(w, p)] -> TOOK; seen[AT(w, p)] = true }
#define IDLE(w) (empty(push[w]) && empty(cancel[w]) && empty(answer[w]) && empty(reply[w]) && empty(credit[w]))
active proctype Observer() {
end:
  do
  OBSERVES(0, 0)
  OBSERVES(0, 1)
  OBSERVES(1, 0)
  OBSERVES(1, 1)
  :: d_step { NEXT(SUMS(0)) summed[0] && !seen_sum[0] -> TOOK; seen_sum[0] = true }
  :: d_step { NEXT(SUMS(1)) summed[1] && !seen_sum[1] -> TOOK; seen_sum[1] = true }
  :: d_step { NEXT(HOLDS(0, slots[0] + overflow_slots[0])) IDLE(0) -> TOOK }
  :: d_step { NEXT(HOLDS(1, slots[1] + overflow_slots[1])) IDLE(1) -> TOOK }
  :: d_step { AT_END && seen[0] && seen[1] && seen[2] && seen[3] && IDLE(0) && IDLE(1) &&
      summed[0] == seen_sum[0] && summed[1] == seen_sum[1] -> ACCEPT }
  od
}
#else
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
    assert(empty(push[w]) && empty(cancel[w]) && empty(answer[w]) && empty(reply[w]) && empty(credit[w]))
  }
}
#endif

init {
  atomic {
    choose_trace();
    if
    :: run Worker(0, 0); run Worker(1, 0)  // in the same order
    :: run Worker(0, 0); run Worker(1, 1)  // in opposite orders
#ifdef TRACE
    :: run Worker(0, 1); run Worker(1, 0)
    :: run Worker(0, 1); run Worker(1, 1)
#endif
    fi
  }
}
