// SPDX-License-Identifier: Apache-2.0
// The recordings that a model follows, for trace.pml. From the file `traces`: for each its length, and its actions.
#include <stdio.h>
#include <stdlib.h>

static short** trace_actions;
static int* trace_length;
static char* is_accepted;

static void load_traces(void) {
  int count = 0, i, j, action;
  FILE* file;
  if (trace_actions) return;
  file = fopen("traces", "r");
  if (!file || fscanf(file, "%d", &count) != 1) exit(9);
  trace_actions = calloc(count, sizeof *trace_actions);
  trace_length = calloc(count, sizeof *trace_length);
  is_accepted = calloc(count, 1);
  for (i = 0; i < count; ++i) {
    if (fscanf(file, "%d", &trace_length[i]) != 1) exit(9);
    trace_actions[i] = calloc(trace_length[i] + 1, sizeof **trace_actions);
    for (j = 0; j < trace_length[i]; ++j) {
      if (fscanf(file, "%d", &action) != 1) exit(9);
      trace_actions[i][j] = (short)action;
    }
  }
  fclose(file);
}

// 0 after the last one.
static short action_at(int which, int pos) {
  return trace_actions[which][pos < trace_length[which] ? pos : trace_length[which]];
}

static void accept_trace(int which) {
  if (!is_accepted[which]) printf("accepted %d\n", which);
  is_accepted[which] = 1;
}
