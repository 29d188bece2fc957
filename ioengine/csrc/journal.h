/*
 * The journal of the guard: a shared memfd into which read(2) puts events of the group directly,
 * so that an event is recorded by the very act of taking it. Private to guard.c and journal.c.
 *
 * A slot is 48 bytes of what the kernel wrote and two inode numbers. 48 bytes hold one event with
 * its range or two without. An entry is (slot * 2 + half); half 1 is used by a second event only.
 */
#ifndef EMBER_JOURNAL_H
#define EMBER_JOURNAL_H

#include <stdbool.h>
#include <stdint.h>

#define JOURNAL_EVENT_BYTES 48
#define JOURNAL_SLOTS_MAX (1u << 20)

struct journal_slot {
	uint8_t raw[JOURNAL_EVENT_BYTES];
	uint64_t inode[2];
};

struct journal {
	struct journal_slot *slots; /* the first slot of the file is its header */
	uint32_t count;
	int lock; /* an open file of our own whose flock says who works with the journal */
	bool locked;
};

struct journal_event {
	int32_t descriptor; /* -1: answered */
	int32_t pid;
	uint64_t offset;
	uint64_t length;
	bool whole; /* the kernel named no range */
	bool strange; /* not an event as this code knows them */
};

int journal_create(uint32_t slots);
int journal_map(struct journal *journal, int descriptor);
void journal_unmap(struct journal *journal);
/* How many events the slot holds (0 to 2), answered ones included. */
unsigned int journal_events(const struct journal *journal, uint32_t slot);
struct journal_event journal_event(const struct journal *journal, uint32_t entry);
/* Makes the slot empty, whatever is in it. */
void journal_reset(struct journal *journal, uint32_t slot);
/* Marks the event as answered; true when the slot has become free (and is all zeros). */
bool journal_clear(struct journal *journal, uint32_t entry);

#endif
