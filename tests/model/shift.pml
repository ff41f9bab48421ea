// SPDX-License-Identifier: Apache-2.0
// Servers get other weights while the job runs: a round of a tensor has one placement on all ranks. Two workers.
// docs/model.md explains it; `ci/test model` runs it.
//
// Each worker starts ROUNDS rounds of one tensor. The scheduler begins SHIFTS shifts, and may call each off at any moment.
// A placement has the number of the shift that made it; 0 is the one that the tensor was declared with.
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef SHIFTS
#define SHIFTS 2
#endif
#define W 2
#define AT(w, r) ((w) * ROUNDS + (r))

mtype = { BEGIN, END, OFF };

chan down[W] = [2 * SHIFTS] of { mtype, byte, byte };  // what, number of the shift, first round
chan up[W] = [SHIFTS] of { byte, byte };               // number of the shift, next round

// ---- A worker: Tensor::next_round, and worker::Shifts
byte next[W];
bool open[W];
byte done[W];
byte from[W], from_before[W];
byte told[W];    // the next round, as the scheduler has been told last
bool failed[W];  // the thread that starts rounds has slept through a whole shift: kTimeout

// ---- What servers see: 1 + the placement of a round; 0: it has not been started
byte placed[W * ROUNDS];

inline place(placement) {
  placed[AT(w, round)] = 1 + placement;
  assert(placed[AT(1 - w, round)] == 0 || placed[AT(1 - w, round)] == placed[AT(w, round)])
}

// Shifts::plans_of
proctype Caller(byte w) {
  byte round;
  bool rests;
  do
  :: next[w] == ROUNDS || failed[w] -> break
  :: next[w] < ROUNDS && !failed[w] ->
#ifdef BUG_LOOKS_FIRST
     rests = !open[w] && done[w] == 0;
#endif
     d_step { round = next[w]; next[w] = next[w] + 1 }
#ifndef BUG_LOOKS_FIRST
     rests = !open[w] && done[w] == 0;
#endif
     if
     :: rests -> d_step { place(0) }
     :: !rests ->
        atomic {
          !open[w] ->
          if
          :: round < from_before[w] -> assert(round < told[w]); failed[w] = true
          :: round >= from_before[w] && round < from[w] -> place(done[w] - 1)
          :: round >= from_before[w] && round >= from[w] -> place(done[w])
          fi
        }
     fi
  od
}

// Planner::begin_shift, which Worker calls, and Planner::end_shift, on the van's thread
proctype Van(byte w) {
  byte number, first;
end:
  do
  :: down[w] ? BEGIN(number, first) ->
#ifdef BUG_READS_FIRST
     told[w] = next[w];
     open[w] = true;
#else
     open[w] = true;
     told[w] = next[w];
#endif
     up[w] ! number, told[w]
  :: down[w] ? END(number, first) ->
     d_step { from_before[w] = from[w]; from[w] = first; done[w] = done[w] + 1; open[w] = false }
  :: down[w] ? OFF(number, first) -> open[w] = false
  od
}

// van::Shift
proctype Scheduler() {
  byte number, said, which, latest, answers, from_last, w;
  bool through;
  do
  :: number == SHIFTS -> break
  :: number < SHIFTS ->
     atomic {
       number++; latest = 0; answers = 0; through = true;
       down[0] ! BEGIN(number, 0); down[1] ! BEGIN(number, 0)
     }
     do
     :: atomic {
        answers < W ->
        if
        :: up[0] ? which, said
        :: up[1] ? which, said
        fi;
        if
        :: which != number                // of a shift that was called off
        :: which == number ->
           answers++;
           through = through && said >= from_last;
#ifdef BUG_EARLIEST
           latest = (answers == 1 || said < latest -> said : latest)
#else
           latest = (said > latest -> said : latest)
#endif
        fi }
     :: answers == W -> break
     :: answers < W -> through = false; break  // one does not answer in time
     od;
#ifdef BUG_NOT_THROUGH
     through = (answers == W);
#endif
     if
     :: atomic { through -> from_last = latest; down[0] ! END(number, latest); down[1] ! END(number, latest) }
     :: atomic { !through -> down[0] ! OFF(number, 0); down[1] ! OFF(number, 0) }
     fi
  od;
end:
  do
  :: up[0] ? which, said
  :: up[1] ? which, said
  od
}

init {
  atomic { run Caller(0); run Caller(1); run Van(0); run Van(1); run Scheduler() }
}
