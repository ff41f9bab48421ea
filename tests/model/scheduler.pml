// SPDX-License-Identifier: Apache-2.0
// Steps that all workers commit or none, while views end, and schedulers die and are replaced. Two workers.
// docs/model.md explains it; `ci/test model` runs it.
//
// A scheduler answers its members one after the other, and may die in between. What it has sent before may arrive, or be
// lost with the connection. ENDINGS views end for another reason, such as the loss of a third member.
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef ENDINGS
#define ENDINGS 1
#endif
#ifndef STEPS
#define STEPS 2
#endif
#define W 2
#include "trace.pml"
#define SCHEDULERS (DEATHS + 1)
#define LINE(g, w) ((g) * W + (w))

// What tests/sim records, see model_scheduler.cc.
#define ACTION(what, w) (16 * (what) + (w))
#define WAITS(w) ACTION(1, w)
#define HEARS_DONE(w) ACTION(2, w)
#define HEARS_END(w) ACTION(3, w)
#define IS_WELCOMED(w) ACTION(4, w)
#define REJOINS(w) ACTION(5, w)
#define DIES ACTION(6, 0)

mtype = { BARRIER, JOIN, DONE, VIEW_ENDED, WELCOME };

chan up[SCHEDULERS * W] = [3] of { mtype };
chan down[SCHEDULERS * W] = [4] of { mtype, byte };   // what, view
bool alive[SCHEDULERS], dead[SCHEDULERS];
byte deaths = DEATHS, endings = ENDINGS;

// ---- Workers
byte committed[W];                       // steps
byte view[W];
byte ended[W];                           // barriers, in this view: RejoinReport::note_barrier
bool waits[W];                           // for the end of one
bool told[W];                            // that its view has ended
byte home[W];                              // its scheduler
byte committed_before[8];                // of each view: what the first worker that was welcomed to it had committed
bool is_known[8];

// ---- What the next scheduler is told: Rejoin
bool came[SCHEDULERS * W];
byte said_view[W], said_ended[W];
bool said_waits[W];

inline rejoin(places) {
  home[w] = home[w] + places;
  said_view[w] = view[w]; said_ended[w] = ended[w]; said_waits[w] = waits[w];
  came[LINE(home[w], w)] = true
}

proctype Worker(byte w) {
  byte v;
end:
  do
  :: d_step { NEXT(WAITS(w)) !told[w] && !waits[w] && committed[w] < STEPS -> TOOK;  // commit()
      waits[w] = true;
      up[LINE(home[w], w)] ! BARRIER }
  :: d_step { NEXT(HEARS_DONE(w)) down[LINE(home[w], w)] ? [DONE, v] -> TOOK;
      down[LINE(home[w], w)] ? DONE, v;
      CHECK(waits[w] && !told[w]);
      waits[w] = false; ended[w]++; committed[w]++; v = 0 }
  :: d_step { NEXT(HEARS_END(w)) down[LINE(home[w], w)] ? [VIEW_ENDED, v] -> TOOK;
      down[LINE(home[w], w)] ? VIEW_ENDED, v;                              // RoundAbortedError: the step is repeated
      waits[w] = false;
      told[w] = true;
      up[LINE(home[w], w)] ! JOIN; v = 0 }
  :: d_step { NEXT(IS_WELCOMED(w)) down[LINE(home[w], w)] ? [WELCOME, v] -> TOOK;
      down[LINE(home[w], w)] ? WELCOME, v;
      told[w] = false; ended[w] = 0; view[w] = v;
      if
      :: !is_known[v] -> is_known[v] = true; committed_before[v] = committed[w]
      :: else
      fi;
      CHECK(committed[w] == committed_before[v]);
      v = 0 }
  // SchedulerSession::search, come_back: at any time after the death; what had not been read by then is lost.
  :: d_step { NEXT(REJOINS(w)) dead[home[w]] && home[w] + 1 < SCHEDULERS && alive[home[w] + 1] -> TOOK; rejoin(1) }
#if DEATHS > 1
  :: d_step { NEXT(REJOINS(w)) dead[home[w]] && home[w] + 2 < SCHEDULERS && alive[home[w] + 2] -> TOOK; rejoin(2) }
#endif
  od
}

// One message to each, in any order; it may die at every point.
inline tell(a, b) {
  if
  :: down[LINE(g, 0)] ! a, b; if :: dies() :: down[LINE(g, 1)] ! a, b fi
  :: down[LINE(g, 1)] ! a, b; if :: dies() :: down[LINE(g, 0)] ! a, b fi
  fi
}
inline dies() {
  atomic { NEXT(DIES) deaths > 0 -> TOOK; deaths--; alive[g] = false; dead[g] = true; goto dead_end }
}

// Reunion::owed
inline owe(w, other) {
  if
#ifndef BUG_OWES_NOTHING
  :: said_view[w] == said_view[other] && said_waits[w] && said_ended[w] < said_ended[other] ->
     down[LINE(g, w)] ! DONE, 0
#endif
  :: else
  fi
}

proctype Scheduler(byte g) {
  byte v;
  bool came_0, came_1;
  atomic { (g == 0 || dead[g - 1]) -> alive[g] = true };
  if
  :: g > 0 ->                            // Phase::kReuniting
     if
     :: came[LINE(g, 0)] && came[LINE(g, 1)]
     :: dies()
     fi;
     v = (said_view[0] > said_view[1] -> said_view[0] : said_view[1]);
#ifdef BUG_VIEW_ENDS_BEFORE_ANSWERS
     tell(VIEW_ENDED, v);
     owe(0, 1); owe(1, 0);
#else
     owe(0, 1);
     if :: dies() :: true fi;
     owe(1, 0);
     if :: dies() :: true fi;
     tell(VIEW_ENDED, v);
#endif
     goto renewing
  :: else
  fi;
running:
end_running:
  do
  :: !came_0 && up[LINE(g, 0)] ? [BARRIER] -> up[LINE(g, 0)] ? BARRIER; came_0 = true
  :: !came_1 && up[LINE(g, 1)] ? [BARRIER] -> up[LINE(g, 1)] ? BARRIER; came_1 = true
  :: came_0 && came_1 -> came_0 = false; came_1 = false; tell(DONE, 0)
  :: endings > 0 -> endings--; tell(VIEW_ENDED, v); break
  :: dies()
  od;
renewing:                                // calls of the view that has ended are dropped
  came_0 = false; came_1 = false;
  do
  :: up[LINE(g, 0)] ? BARRIER
  :: up[LINE(g, 1)] ? BARRIER
  :: up[LINE(g, 0)] ? JOIN -> came_0 = true
  :: up[LINE(g, 1)] ? JOIN -> came_1 = true
  :: came_0 && came_1 -> break
  :: dies()
  od;
  v++;
  came_0 = false; came_1 = false;
  tell(WELCOME, v);
  goto running;
dead_end:
  skip
}

#ifdef TRACE
active proctype Observer() {
end:
  do
  :: d_step { AT_END && committed[0] == STEPS && committed[1] == STEPS -> ACCEPT }
  od
}
#else
active proctype Monitor() {
  timeout ->
  assert(committed[0] == STEPS && committed[1] == STEPS);
  assert(!told[0] && !told[1])
}
#endif

init {
  atomic {
    choose_trace();
    run Worker(0); run Worker(1);
    run Scheduler(0)
#if DEATHS > 0
    ; run Scheduler(1)
#endif
#if DEATHS > 1
    ; run Scheduler(2)
#endif
  }
}
