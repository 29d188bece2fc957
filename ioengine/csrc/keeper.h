/*
 * What the two halves of the keeper know of each other; keeper.c says what a keeper is.
 */
#ifndef EMBER_KEEPER_H
#define EMBER_KEEPER_H

#include <stdbool.h>

enum { EXIT_USAGE = 2, EXIT_RUNNING = 3, EXIT_SYSTEM = 4 };

struct keeper_place {
	int oom_score_adj;
	bool own_cgroup;
};

/* Takes the lock and listens on `path`; 0, or the exit status of a keeper that has no place. */
int keeper_listen(const char *path, int backlog, int *listening);

/* Leaves the starter's session: returns in the process that stays; 0 or an exit status. */
int keeper_go_background(void);

/* Stays through signals, memory pressure and, with `cgroup`, the end of the starter's group. */
struct keeper_place keeper_settle_in(const char *cgroup);

void keeper_close_stdio(void);

#endif
