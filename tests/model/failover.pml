// SPDX-License-Identifier: Apache-2.0
// BPS_SERVER_FAILOVER: two workers sum arrays in place by SERVERS servers, of which CRASHES die at any moment.
// docs/model.md explains it; `ci/test model` runs it.
//
// Each worker makes ROUNDS operations of PARTS partitions, one after the other. Answers land in buffers, and are copied
// over the input when every worker has its own (two phases). What a dead server or an earlier view has sent stays in
// the channels, and may come at any time.
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
#define IS_OVER(w) (state[AT(w, 0)] == DONE && state[AT(w, PARTS - 1)] == DONE)
// What a worker has reported at the beginning of this view: bps_rdma/failover.py, Report.
byte said_begun[W];
bool said_over[W];
bool said_missing[W * PARTS];

// ---- Servers
byte server_epoch[SERVERS] = 1;
bool pushed[SERVERS * W * PARTS];
bool landed[SERVERS * W * PARTS];

inline send_push(p) {                    // Sender::push, to the server of this partition in this view
  home = p % SERVERS;
  do
  :: !in_view[home] -> home = (home + 1) % SERVERS
  :: else -> break
  od;
  up[LINE(w, home)] ! PUSH, p, worker_epoch[w];
  state[AT(w, p)] = SENT;
  home = 0
}

#ifdef BUG_STALE_ACCEPTED
#define OF_THIS_VIEW(e, mine) true
#else
#define OF_THIS_VIEW(e, mine) (e == mine)
#endif

inline take_reply(s) {
  if
  :: what == ANSWER && !suspended[w] && OF_THIS_VIEW(e, worker_epoch[w]) && state[AT(w, p)] == SENT ->
#ifdef BUG_ONE_PHASE
     state[AT(w, p)] = DONE;             // over the input, as without BPS_SERVER_FAILOVER
#else
     state[AT(w, p)] = BUFFERED;         // WorkerLoop::on_answer
#endif
     up[LINE(w, s)] ! LANDED, p, worker_epoch[w]
  :: what == COMMITTED && !suspended[w] && OF_THIS_VIEW(e, worker_epoch[w]) ->
#ifndef BUG_ONE_PHASE
     assert(state[AT(w, p)] == (WANTS(w, p) -> BUFFERED : SENT));
#endif
     state[AT(w, p)] = DONE              // on_committed: over the input
  :: else                                // of an earlier view
  fi;
  p = 0; e = 0; what = PUSH
}

inline end_view() {                      // Process::retire, Operation::suspend, failover.report
  worker_epoch[w] = epoch;
  suspended[w] = true;
  for (p : 0 .. PARTS - 1) {
    if
    :: state[AT(w, p)] == SENT -> state[AT(w, p)] = QUEUED
    :: else
    fi;
    said_missing[AT(w, p)] = (state[AT(w, p)] == QUEUED && MISSES(w, p))
  }
  said_begun[w] = begun[w];
  said_over[w] = IS_OVER(w);
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
       needed = said_missing[AT(w, p)] || (said_begun[0] == said_begun[1] && said_missing[AT(1 - w, p)]);
       if
       :: again || needed ->
          assert(again || !over_elsewhere);
          assert(state[AT(w, p)] != DONE);  // the input is as it was
          state[AT(w, p)] = QUEUED
       :: else -> state[AT(w, p)] = DONE
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

proctype Worker(byte w) {
  byte p, e, home;
  mtype what = PUSH;
  bool needed, again, over_elsewhere;
end:
  do
  // The caller fills its array, and calls push_pull.
  :: d_step { !suspended[w] && begun[w] < ROUNDS && IS_OVER(w) ->
      begun[w]++;
      for (p : 0 .. PARTS - 1) { state[AT(w, p)] = QUEUED }
      p = 0 }
  :: d_step { !suspended[w] && worker_epoch[w] == epoch && state[AT(w, 0)] == QUEUED -> send_push(0) }
  :: d_step { down[LINE(w, 0)] ? what, p, e -> take_reply(0) }
  :: d_step { down[LINE(w, 1)] ? what, p, e -> take_reply(1) }
#if PARTS > 1
  :: d_step { !suspended[w] && worker_epoch[w] == epoch && state[AT(w, 1)] == QUEUED -> send_push(1) }
#endif
#if SERVERS > 2
  :: d_step { down[LINE(w, 2)] ? what, p, e -> take_reply(2) }
#endif
  :: d_step { worker_epoch[w] < epoch -> end_view() }
  :: d_step { suspended[w] && worker_epoch[0] == epoch && worker_epoch[1] == epoch && SERVERS_READY -> follow_plan() }
  od
}

inline take(v) {                         // RoundEngine::take, on_landed
  if
  :: !OF_THIS_VIEW(e, server_epoch[s])
  :: OF_THIS_VIEW(e, server_epoch[s]) && what == PUSH ->
     assert(!pushed[ON(s, v, p)]);
     pushed[ON(s, v, p)] = true;
     if
#ifdef BUG_ONE_CONTRIBUTION_LESS
     :: pushed[ON(s, 0, p)] ->
#else
     :: pushed[ON(s, 0, p)] && pushed[ON(s, 1, p)] ->
#endif
        assert(pushed[ON(s, 0, p)] && pushed[ON(s, 1, p)]);
        for (i : 0 .. W - 1) {               // propose()
          if
          :: WANTS(i, p) -> down[LINE(i, s)] ! ANSWER, p, server_epoch[s]
          :: else -> landed[ON(s, i, p)] = true
          fi
        }
        i = 0
     :: else
     fi
  :: OF_THIS_VIEW(e, server_epoch[s]) && what == LANDED ->
     assert(pushed[ON(s, 0, p)] && pushed[ON(s, 1, p)]);
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
  fi;
  p = 0; e = 0; what = PUSH
}

inline forget(p) {
  for (i : 0 .. W - 1) {
    pushed[ON(s, i, p)] = false;
    landed[ON(s, i, p)] = false
  }
  i = 0
}

proctype Server(byte s) {
  byte p, e, i;
  mtype what = PUSH;
end:
  do
  :: d_step { alive[s] && len(up[LINE(0, s)]) > 0 -> up[LINE(0, s)] ? what, p, e; take(0) }
  :: d_step { alive[s] && len(up[LINE(1, s)]) > 0 -> up[LINE(1, s)] ? what, p, e; take(1) }
  :: d_step { alive[s] && in_view[s] && server_epoch[s] < epoch ->
      server_epoch[s] = epoch;
      for (p : 0 .. PARTS - 1) { forget(p) }
      p = 0 }
  :: d_step { alive[s] && crashes > 0 && OTHERS_ALIVE(s) -> alive[s] = false; crashes-- }
  // Job::lose: the scheduler hears of it at some time, and ends the view.
  :: d_step { !alive[s] && in_view[s] -> in_view[s] = false; epoch++ }
  od
}

active proctype Monitor() {
  timeout ->
  assert(begun[0] == ROUNDS && begun[1] == ROUNDS && IS_OVER(0) && IS_OVER(1));
  assert(!suspended[0] && !suspended[1])
}

init {
  atomic {
    run Worker(0); run Worker(1);
    run Server(0); run Server(1)
#if SERVERS > 2
    ; run Server(2)
#endif
  }
}
