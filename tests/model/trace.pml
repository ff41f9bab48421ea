// SPDX-License-Identifier: Apache-2.0
// With TRACE a model follows recorded actions of the simulator (tests/sim) instead of doing what it likes: a step that
// has an action in the recording is taken only where it comes next. Steps without one remain free. traces.py runs it.
//
//   NEXT(a) before the guard of a step, TOOK as its first statement; CHECK in place of assert.
#ifdef TRACE
c_decl { \#include "traces.h" };
#define BROKEN 32767                     // what no recording has: the rest of it cannot be followed
int which;                               // of TRACES recordings
short pos, want;                         // the next one of its actions
#define NEXT(a) (want == (a)) &&
#define TOOK pos++; c_code { now.want = action_at(now.which, now.pos); }
#define CHECK(x) if :: (x) :: else -> want = BROKEN fi
// Within a step, an action that follows at once.
#define FOLLOWED_BY(a) if :: want == (a) -> TOOK :: else -> want = BROKEN fi
#define AT_END (want == 0)
#define ACCEPT c_code { accept_trace(now.which); }; want = BROKEN
inline choose_trace() {
  c_code { load_traces(); };
  do
  :: which < TRACES - 1 -> which++
  :: break
  od;
  c_code { now.want = action_at(now.which, 0); }
}
#else
#define NEXT(a)
#define TOOK skip
#define CHECK(x) assert(x)
#define FOLLOWED_BY(a) skip
inline choose_trace() { skip }
#endif
