// SPDX-License-Identifier: Apache-2.0
// BPS_SERVER_FAILOVER: two workers sum arrays in place by SERVERS servers, of which CRASHES die at any moment.
// docs/model.md explains it; `ci/test model` runs it.
//
// Each worker makes ROUNDS operations of PARTS partitions, one after the other. Answers count when every worker has its
// own (two phases); with PIECES they land over the input, one half after the other, else in a buffer. What is sent may
// arrive in any order; what a dead server or an earlier view has sent may come at any time.
#ifndef SERVERS
#define SERVERS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef ROUNDS
#define ROUNDS 1
#endif
#define W 2
#define ROOM (2 * PARTS + 2 * CRASHES)
#define AT(w, p) ((w) * PARTS + (p))
#include "trace.pml"
// Whether an operation's caller wants the result of a partition: push_pull's do; each rank of a reduce_scatter wants its
// own share, and hears only of the end of the others (SHARDED).
#ifdef SHARDED
#define WANTS(w, p) ((w) == (p))
#else
#define WANTS(w, p) true
#endif
#ifdef BUG_MISSES_UNWANTED
#define MISSES(w, p) true
#else
#define MISSES(w, p) WANTS(w, p)         // Operation::missing
#endif
#define LINE(w, s) ((w) * SERVERS + (s))

// What tests/sim records, see model_failover.cc.
#define ACTION(what, w, s, p) (16 * (what) + 4 * (w) + 2 * (s) + (p))
#define BEGINS(w) ACTION(1, w, 0, 0)
#define PUSHES(w, s, p) ACTION(2, w, s, p)
#define TAKES_PUSH(w, s, p) ACTION(3, w, s, p)
#define HEARS_ANSWER(w, s, p) ACTION(4, w, s, p)
#define TAKES_LANDED(w, s, p) ACTION(5, w, s, p)
#define HEARS_COMMITTED(w, s, p) ACTION(6, w, s, p)
#define DIES(s) ACTION(7, 0, s, 0)
#define ENDS_VIEW(w) ACTION(8, w, 0, 0)
#define SERVES(s) ACTION(9, 0, s, 0)
#define COMPLETES(w) ACTION(10, w, 0, 0)

mtype = { PUSH, LANDED, ANSWER, COMMITTED };
mtype = { QUEUED, SENT, BUFFERED, DONE };

chan up[W * SERVERS] = [ROOM] of { mtype, byte, byte };    // what, partition, epoch
chan down[W * SERVERS] = [ROOM] of { mtype, byte, byte };

#define ON(s, w, p) (((s) * W + (w)) * PARTS + (p))

// ---- The view, as the scheduler decides it
byte epoch = 1;
bool in_view[SERVERS] = true;
bool alive[SERVERS] = true;
byte crashes = CRASHES;

// ---- Workers. Between two operations the state of each partition is DONE.
byte worker_epoch[W] = 1;
bool suspended[W];                       // this view has begun, and its plan is not known here yet
byte begun[W];                           // operations
mtype state[W * PARTS] = DONE;           // of the last one's partitions
bool half[W * PARTS];                    // the first half of the result is here, and that of the input gone
#define IS_OVER(w) (state[AT(w, 0)] == DONE && state[AT(w, PARTS - 1)] == DONE)
// What a worker has reported at the beginning of this view: bps_rdma/failover.py, RankReport.
byte said_begun[W];
bool said_over[W];
bool said_missing[W * PARTS];
bool said_half[W * PARTS];               // of what is missing
bool said_whole[W * PARTS];
bool has_gifts[W];                       // what it lacked and the other had

// ---- Servers
byte server_epoch[SERVERS] = 1;
bool pushed[SERVERS * W * PARTS];
bool landed[SERVERS * W * PARTS];

// Messages of this view are taken in any order; those of earlier ones change nothing.
#ifdef BUG_STALE_ACCEPTED
#define OF(mine) _
#else
#define OF(mine) eval(mine)
#endif
#define TAKES(line, what, p, mine) line ?? [what, p, OF(mine)]
#define FORGETS_STALE(line, mine, is_here) \
  :: d_step { is_here mine > 1 && line ?? [_, _, 1] -> line ?? _, _, 1 } \
  FORGETS_STALER(line, mine, is_here)
#if CRASHES > 1
#define FORGETS_STALER(line, mine, is_here) \
  :: d_step { is_here mine > 2 && line ?? [_, _, 2] -> line ?? _, _, 2 }
#else
#define FORGETS_STALER(line, mine, is_here)
#endif

#define MAY_PUSH(p) (!suspended[w] && worker_epoch[w] == epoch && state[AT(w, p)] == QUEUED)

inline send_push(s, p) {                 // Sender::push
  up[LINE(w, s)] ! PUSH, p, worker_epoch[w];
  state[AT(w, p)] = SENT
}

inline send_push_home(p) {               // to the server of this partition in this view
  home = p % SERVERS;
  do
  :: !in_view[home] -> home = (home + 1) % SERVERS
  :: else -> break
  od;
  send_push(home, p);
  home = 0
}

inline take_answer(s, p) {               // Receiver::on_answer
  if
  :: state[AT(w, p)] == SENT ->
#ifdef BUG_ONE_PHASE
     state[AT(w, p)] = DONE;             // over the input, as without BPS_SERVER_FAILOVER
#else
     state[AT(w, p)] = BUFFERED;
     half[AT(w, p)] = false;
#endif
     up[LINE(w, s)] ! LANDED, p, worker_epoch[w]
  :: else
  fi
}

inline take_committed(p) {               // on_committed: over the input
#ifndef BUG_ONE_PHASE
  CHECK(state[AT(w, p)] == (WANTS(w, p) -> BUFFERED : SENT));
#endif
  state[AT(w, p)] = DONE
}

inline end_view() {                      // Process::retire, Portion::suspend, failover.report
  worker_epoch[w] = epoch;
  suspended[w] = true;
  has_gifts[w] = false;
  for (p : 0 .. PARTS - 1) {
    if
    :: state[AT(w, p)] == SENT -> state[AT(w, p)] = QUEUED
    :: else
    fi;
    said_missing[AT(w, p)] = (state[AT(w, p)] == QUEUED && MISSES(w, p));
#ifndef BUG_GIVES_NOTHING
    said_half[AT(w, p)] = (said_missing[AT(w, p)] && half[AT(w, p)]);
    said_whole[AT(w, p)] = (state[AT(w, p)] == BUFFERED)
#endif
  }
  said_begun[w] = begun[w];
  said_over[w] = IS_OVER(w);
  p = 0
}

#define SAME_OPERATION (said_begun[0] == said_begun[1])
#define GIVEN(p) (SAME_OPERATION && (said_whole[AT(0, p)] || said_whole[AT(1, p)]))

#define GIVES(v, p) (said_missing[AT(1 - v, p)] && (said_whole[AT(v, p)] || (said_half[AT(v, p)] && !said_half[AT(1 - v, p)])))
#define ANY_GIFT (SAME_OPERATION && (GIVES(0, 0) || GIVES(1, 0) || GIVES(0, PARTS - 1) || GIVES(1, PARTS - 1)))

inline take_gifts() {                    // failover.give
  for (p : 0 .. PARTS - 1) {
    if
    :: SAME_OPERATION && said_missing[AT(w, p)] && said_whole[AT(1 - w, p)] ->
       state[AT(w, p)] = BUFFERED;
       half[AT(w, p)] = false
    :: SAME_OPERATION && said_missing[AT(w, p)] && !said_whole[AT(1 - w, p)] && said_half[AT(1 - w, p)] ->
       half[AT(w, p)] = true
    :: else
    fi
  }
  has_gifts[w] = true;
  p = 0
}

inline follow_plan() {                   // failover.plan, failover.resume
  // The operations that some rank has not begun are started again by the others.
  again = (said_begun[0] != said_begun[1] && begun[w] > said_begun[1 - w]);
  // An operation that is over somewhere cannot be repeated.
  over_elsewhere = (said_begun[1 - w] > begun[w] || (said_begun[1 - w] == begun[w] && said_over[1 - w]));
  for (p : 0 .. PARTS - 1) {
    if
    :: IS_OVER(w) && !again
    :: !IS_OVER(w) || again ->
       needed = said_missing[AT(w, p)] || (SAME_OPERATION && said_missing[AT(1 - w, p)]);
       if
       :: again || (needed && !GIVEN(p)) ->
          CHECK(again || !over_elsewhere);
          // The input is as it was, from the same element on as that of the other.
          CHECK(state[AT(w, p)] == QUEUED);
          CHECK(!again || !half[AT(w, p)]);
          CHECK(again || !WANTS(0, p) || !WANTS(1, p) || half[AT(w, p)] == half[AT(1 - w, p)])
       :: else ->
          state[AT(w, p)] = DONE;
          half[AT(w, p)] = false
       fi
    fi
  }
  suspended[w] = false;
  p = 0; needed = false; again = false; over_elsewhere = false
}

#define READY(s) (!in_view[s] || server_epoch[s] == epoch)
#if SERVERS > 2
#define SERVERS_READY (READY(0) && READY(1) && READY(2))
#define OTHERS_ALIVE(s) (alive[(s + 1) % SERVERS] || alive[(s + 2) % SERVERS])
#else
#define SERVERS_READY (READY(0) && READY(1))
#define OTHERS_ALIVE(s) alive[1 - s]
#endif

// Of one partition and one server.
#define HEARS(s, p) \
  :: d_step { NEXT(HEARS_ANSWER(w, s, p)) !suspended[w] && TAKES(down[LINE(w, s)], ANSWER, p, worker_epoch[w]) -> TOOK; \
      down[LINE(w, s)] ?? ANSWER, p, OF(worker_epoch[w]); take_answer(s, p) } \
  :: d_step { NEXT(HEARS_COMMITTED(w, s, p)) !suspended[w] && \
      TAKES(down[LINE(w, s)], COMMITTED, p, worker_epoch[w]) -> TOOK; \
      down[LINE(w, s)] ?? COMMITTED, p, OF(worker_epoch[w]); take_committed(p) } \
  HEARS_HALF(s, p)
#ifdef PIECES
#define HEARS_HALF(s, p) \
  :: d_step { !suspended[w] && state[AT(w, p)] == SENT && !half[AT(w, p)] && \
      TAKES(down[LINE(w, s)], ANSWER, p, worker_epoch[w]) -> half[AT(w, p)] = true }
#else
#define HEARS_HALF(s, p)
#endif
#define HEARS_FROM(s) HEARS(s, 0) HEARS_OF_SECOND(s) FORGETS_STALE(down[LINE(w, s)], worker_epoch[w], )
#if PARTS > 1
#define HEARS_OF_SECOND(s) HEARS(s, 1)
#else
#define HEARS_OF_SECOND(s)
#endif
// A recording says itself to which server.
#ifdef TRACE
#define SENDS_PUSH(p) \
  :: d_step { NEXT(PUSHES(w, 0, p)) in_view[0] && MAY_PUSH(p) -> TOOK; send_push(0, p) } \
  :: d_step { NEXT(PUSHES(w, 1, p)) in_view[1] && MAY_PUSH(p) -> TOOK; send_push(1, p) }
#else
#define SENDS_PUSH(p) :: d_step { MAY_PUSH(p) -> send_push_home(p) }
#endif

proctype Worker(byte w) {
  byte p, home;
  bool needed, again, over_elsewhere;
end:
  do
  // The caller fills its array, and calls push_pull.
  :: d_step { NEXT(BEGINS(w)) !suspended[w] && begun[w] < ROUNDS && IS_OVER(w) -> TOOK;
      begun[w]++;
      for (p : 0 .. PARTS - 1) { state[AT(w, p)] = QUEUED }
      p = 0 }
  SENDS_PUSH(0)
  HEARS_FROM(0)
  HEARS_FROM(1)
#if PARTS > 1
  SENDS_PUSH(1)
#endif
#if SERVERS > 2
  HEARS_FROM(2)
#endif
  :: d_step { NEXT(ENDS_VIEW(w)) worker_epoch[w] < epoch -> TOOK; end_view() }
  :: d_step { suspended[w] && worker_epoch[0] == epoch && worker_epoch[1] == epoch && SERVERS_READY && !has_gifts[w] ->
      take_gifts() }
#ifdef BUG_DOES_NOT_WAIT
  :: d_step { suspended[w] && worker_epoch[w] == epoch && has_gifts[w] -> follow_plan() }
#else
  :: d_step { suspended[w] && worker_epoch[w] == epoch && has_gifts[w] && (has_gifts[1 - w] || !ANY_GIFT) -> follow_plan() }
#endif
  od
}

inline take_push(v, p) {                 // RoundEngine::take
  CHECK(!pushed[ON(s, v, p)]);
  pushed[ON(s, v, p)] = true;
  if
#ifdef BUG_ONE_CONTRIBUTION_LESS
  :: pushed[ON(s, 0, p)] ->
#else
  :: pushed[ON(s, 0, p)] && pushed[ON(s, 1, p)] ->
#endif
     CHECK(pushed[ON(s, 0, p)] && pushed[ON(s, 1, p)]);
     for (i : 0 .. W - 1) {              // propose()
       if
       :: WANTS(i, p) -> down[LINE(i, s)] ! ANSWER, p, server_epoch[s]
       :: else -> landed[ON(s, i, p)] = true
       fi
     }
     i = 0
  :: else
  fi
}

inline take_landed(v, p) {               // RoundEnds::on_landed
  CHECK(pushed[ON(s, 0, p)] && pushed[ON(s, 1, p)]);
  landed[ON(s, v, p)] = true;
  if
#ifdef BUG_COMMITS_EARLY
  :: true ->
#else
  :: landed[ON(s, 0, p)] && landed[ON(s, 1, p)] ->
#endif
     down[LINE(0, s)] ! COMMITTED, p, server_epoch[s];  // commit()
     down[LINE(1, s)] ! COMMITTED, p, server_epoch[s];
     forget(p)
  :: else
  fi
}

inline forget(p) {
  for (i : 0 .. W - 1) {
    pushed[ON(s, i, p)] = false;
    landed[ON(s, i, p)] = false
  }
  i = 0
}

#define SERVES_WORKER(v, p) \
  :: d_step { NEXT(TAKES_PUSH(v, s, p)) alive[s] && TAKES(up[LINE(v, s)], PUSH, p, server_epoch[s]) -> TOOK; \
      up[LINE(v, s)] ?? PUSH, p, OF(server_epoch[s]); take_push(v, p) } \
  :: d_step { NEXT(TAKES_LANDED(v, s, p)) alive[s] && TAKES(up[LINE(v, s)], LANDED, p, server_epoch[s]) -> TOOK; \
      up[LINE(v, s)] ?? LANDED, p, OF(server_epoch[s]); take_landed(v, p) }

proctype Server(byte s) {
  byte q, i;
end:
  do
  SERVES_WORKER(0, 0)
  SERVES_WORKER(1, 0)
#if PARTS > 1
  SERVES_WORKER(0, 1)
  SERVES_WORKER(1, 1)
#endif
  FORGETS_STALE(up[LINE(0, s)], server_epoch[s], alive[s] &&)
  FORGETS_STALE(up[LINE(1, s)], server_epoch[s], alive[s] &&)
  :: d_step { NEXT(SERVES(s)) alive[s] && in_view[s] && server_epoch[s] < epoch -> TOOK;
      server_epoch[s] = epoch;
      for (q : 0 .. PARTS - 1) { forget(q) }
      q = 0 }
  :: d_step { NEXT(DIES(s)) alive[s] && crashes > 0 && OTHERS_ALIVE(s) -> TOOK; alive[s] = false; crashes-- }
  // Job::lose: the scheduler hears of it at some time, and ends the view.
  :: d_step { !alive[s] && in_view[s] -> in_view[s] = false; epoch++ }
  od
}

#ifdef TRACE
byte seen[W];                            // operations that are over
active proctype Observer() {
end:
  do
  :: d_step { NEXT(COMPLETES(0)) IS_OVER(0) && !suspended[0] && seen[0] < begun[0] -> TOOK; seen[0]++ }
  :: d_step { NEXT(COMPLETES(1)) IS_OVER(1) && !suspended[1] && seen[1] < begun[1] -> TOOK; seen[1]++ }
  :: d_step { AT_END && seen[0] == ROUNDS && seen[1] == ROUNDS -> ACCEPT }
  od
}
#else
active proctype Monitor() {
  timeout ->
  assert(begun[0] == ROUNDS && begun[1] == ROUNDS && IS_OVER(0) && IS_OVER(1));
  assert(!suspended[0] && !suspended[1])
}
#endif

init {
  atomic {
    choose_trace();
    run Worker(0); run Worker(1);
    run Server(0); run Server(1)
#if SERVERS > 2
    ; run Server(2)
#endif
  }
}
