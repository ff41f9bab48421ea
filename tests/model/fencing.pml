// SPDX-License-Identifier: Apache-2.0
// When a call may return although a server is lost: two workers, two servers, one partition on each of them, one call of
// each worker. docs/model.md explains it; `ci/test model` runs it.
//
// Server 0 may be stopped (for a while or for ever) or die between any two writes, as often as FAULTS says, and may be
// given up although it runs, as often as MISTAKES says; server 1 is the same to the workers, and nothing happens to it.
// DEADLINES of the two calls may pass. With DIRECT=1 it lies on the host of the workers and writes into
// their memory itself; with DIRECT=0 its answers travel by connections, and what is under way when it dies still lands.
#ifndef DIRECT
#define DIRECT 1
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef MISTAKES
#define MISTAKES 0
#endif
#ifndef DEADLINES
#define DEADLINES 1
#endif
#define W 2
#define S 2
#define LINE(w, s) ((w) * S + (s))

mtype = { FAILED, ABORTED, ANSWERED };
mtype = { IDLE, SENT, OVER };

chan push[W * S] = [1] of { bit };
chan cancel[W * S] = [1] of { bit };
chan answer[W * S] = [1] of { bit };       // the bytes of an answer, or with DIRECT the word that they have been written
chan reply[W * S] = [2] of { mtype };

// ---- Servers
bool alive[S] = true, stopped[S], for_ever[S];
byte faults = FAULTS, mistakes = MISTAKES, deadlines = DEADLINES;

// ---- The scheduler
bool lost[S];

// ---- Workers
mtype state[W * S] = IDLE;                 // the partition of this call on that server
bool has_result[W * S];
bool failing[W], cancelled[W * S];
bool abandoned[W * S];                     // the connection is closed
bool knows[W * S];                         // ServerLoss::why
#define RETURNED(w) (state[LINE(w, 0)] == OVER && state[LINE(w, 1)] == OVER)

inline send_cancel(w, s) {                 // Cancellation::send_cancel: once
  if
  :: state[LINE(w, s)] == SENT && !cancelled[LINE(w, s)] && !abandoned[LINE(w, s)] ->
     cancelled[LINE(w, s)] = true;
     cancel[LINE(w, s)] ! 0
  :: else
  fi
}

inline abort(w) {                          // Cancellation::abort
  failing[w] = true;
  send_cancel(w, 0);
  send_cancel(w, 1)
}

inline close_connection(w, s) {            // ServerConnection::close: nothing lands from then on
  abandoned[LINE(w, s)] = true
#ifndef BUG_NOT_CLOSED
  ;
  do
  :: len(push[LINE(w, s)]) > 0 -> push[LINE(w, s)] ? _
  :: len(cancel[LINE(w, s)]) > 0 -> cancel[LINE(w, s)] ? _
  :: len(answer[LINE(w, s)]) > 0 -> answer[LINE(w, s)] ? _
  :: len(reply[LINE(w, s)]) > 0 -> reply[LINE(w, s)] ? _
  :: else -> break
  od
#endif
}

inline goto_over(w, s) {
  if
  :: state[LINE(w, s)] == SENT -> state[LINE(w, s)] = OVER
  :: else
  fi
}

inline end_all_of(w, s) {                  // ServerLosses::end_all_of
#ifndef BUG_NO_FENCE
  if
  :: DIRECT && state[LINE(w, s)] == SENT -> alive[s] = false   // DirectAccess::fence
  :: else
  fi;
#endif
  close_connection(w, s);
  goto_over(w, s)
}

inline take_reply(s) {
  if
  :: state[LINE(w, s)] != SENT             // of a partition that is over
  :: state[LINE(w, s)] == SENT && what == FAILED ->            // on_push_failed
     state[LINE(w, s)] = OVER;
     abort(w)
  :: state[LINE(w, s)] == SENT && what == ABORTED -> state[LINE(w, s)] = OVER  // on_cancelled
  :: state[LINE(w, s)] == SENT && what == ANSWERED             // the answer is on its way
  fi;
  what = FAILED
}

inline take_answer(s) {                    // on_answer
  assert(DIRECT || state[LINE(w, s)] != OVER);   // I8: these are the bytes
  if
  :: state[LINE(w, s)] == SENT -> has_result[LINE(w, s)] = true; state[LINE(w, s)] = OVER
  :: else
  fi
}

inline report(s) {                         // on_lost: the scheduler is told, and decides
  lost[s] = true;
  if
  :: !DIRECT -> close_connection(w, s)
  :: DIRECT
  fi
}

inline lose(s) {                           // lose_server, lose
  knows[LINE(w, s)] = true;
  abort(w);
  if
  :: !DIRECT -> end_all_of(w, s)
  :: DIRECT                                // until fence_at, or until its connection breaks
  fi
}

#define IS_SILENT(s) (!alive[s] || stopped[s] || mistakes > 0)
#define CAN_REPORT(s) (IS_SILENT(s) && !lost[s])

proctype Worker(byte w) {
  mtype what = FAILED;
end:
  do
  :: d_step { state[LINE(w, 0)] == IDLE ->
      if
      :: knows[LINE(w, 0)] ->             // this view has ended: the call fails at once
         state[LINE(w, 0)] = OVER; state[LINE(w, 1)] = OVER
      :: else ->
         state[LINE(w, 0)] = SENT; state[LINE(w, 1)] = SENT;
         if
         :: !abandoned[LINE(w, 0)] -> push[LINE(w, 0)] ! 0
         :: else
         fi;
         if
         :: !abandoned[LINE(w, 1)] -> push[LINE(w, 1)] ! 0
         :: else
         fi
      fi }
  :: d_step { deadlines > 0 && state[LINE(w, 0)] != IDLE && !RETURNED(w) && !failing[w] ->   // check_deadlines
      deadlines--;
      abort(w)
#ifdef BUG_RETURNS_BEFORE_ACKNOWLEDGED
      ; state[LINE(w, 0)] = OVER; state[LINE(w, 1)] = OVER
#endif
      }
  :: d_step { answer[LINE(w, 0)] ? _ -> take_answer(0) }
  :: d_step { answer[LINE(w, 1)] ? _ -> take_answer(1) }
  :: d_step { reply[LINE(w, 0)] ? what -> take_reply(0) }
  :: d_step { reply[LINE(w, 1)] ? what -> take_reply(1) }
  :: d_step { CAN_REPORT(0) -> mistakes = (!alive[0] || stopped[0] -> mistakes : mistakes - 1); report(0) }
  :: d_step { lost[0] && !knows[LINE(w, 0)] -> lose(0) }
  // check_replies: fence_at has passed; or on_lost, of a server that was being fenced
  :: d_step { DIRECT && knows[LINE(w, 0)] && !abandoned[LINE(w, 0)] -> end_all_of(w, 0) }
  od
}

inline send_reply(v, word) {
  if
  :: !abandoned[LINE(v, s)] -> reply[LINE(v, s)] ! word
  :: else
  fi
}

inline take_push(v) {                      // PushAdmission::admit, record
  if
  :: failed -> told[v] = true; send_reply(v, FAILED)
  :: else -> pushed[v] = true
  fi
}

inline fail(v) {                           // RoundEngine::cancel, RoundEnds::fail
  failed = true;
  told[v] = true;
  send_reply(v, ABORTED);
  if
  :: pushed[1 - v] && !told[1 - v] -> told[1 - v] = true; send_reply(1 - v, FAILED)
  :: else
  fi
}

inline take_cancel(v) {
  if
  :: answered[v] -> send_reply(v, ANSWERED)
  :: !answered[v] && failed -> send_reply(v, ABORTED)
  :: else -> fail(v)
  fi
}

inline write_answer(v) {                   // answer_all: one write for each worker, one after the other
  if
  :: DIRECT -> assert(state[LINE(v, s)] != OVER)   // I8: these are the bytes
  :: !DIRECT
  fi;
  answered[v] = true;
  if
  :: !abandoned[LINE(v, s)] -> answer[LINE(v, s)] ! 0
  :: else
  fi
}

#define RUNS (alive[s] && !stopped[s])
#define TAKES (RUNS && written == W)       // no message is taken in the middle of a sum

proctype Server(byte s) {
  bool pushed[W], told[W], answered[W], failed, summed;
  byte written = W;                        // of the sum's answers; W: none is being written
end:
  do
  :: d_step { TAKES && len(push[LINE(0, s)]) > 0 -> push[LINE(0, s)] ? _; take_push(0) }
  :: d_step { TAKES && len(push[LINE(1, s)]) > 0 -> push[LINE(1, s)] ? _; take_push(1) }
  :: d_step { TAKES && len(cancel[LINE(0, s)]) > 0 -> cancel[LINE(0, s)] ? _; take_cancel(0) }
  :: d_step { TAKES && len(cancel[LINE(1, s)]) > 0 -> cancel[LINE(1, s)] ? _; take_cancel(1) }
  :: d_step { TAKES && pushed[0] && pushed[1] && !failed && !summed -> summed = true; written = 0 }
  :: d_step { RUNS && written == 0 -> write_answer(0); written = 1 }
  :: d_step { RUNS && written == 1 -> write_answer(1); written = 2 }
  :: d_step { s == 0 && RUNS && faults > 0 -> faults--; alive[s] = false }
  :: d_step { s == 0 && RUNS && faults > 0 -> faults--; stopped[s] = true }
  :: d_step { s == 0 && RUNS && faults > 0 -> faults--; stopped[s] = true; for_ever[s] = true }
  :: d_step { alive[s] && stopped[s] && !for_ever[s] -> stopped[s] = false }
  od
}

// When nothing can happen any more, every call has returned; without faults and deadlines, with its result.
active proctype Monitor() {
  byte w;
  timeout ->
  for (w : 0 .. W - 1) {
    assert(RETURNED(w));
    assert(FAULTS + MISTAKES + DEADLINES > 0 || (has_result[LINE(w, 0)] && has_result[LINE(w, 1)]))
  }
}

init {
  atomic { run Worker(0); run Worker(1); run Server(0); run Server(1) }
}
