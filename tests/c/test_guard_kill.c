/*
 * Daemons are killed with -9 at random while they take, fill and answer events. No event may be
 * lost (its reader would wait for ever) and none let through early (its reader would see zeros).
 * This process plays the keeper: it holds group and journal, and answers nothing.
 */
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>

#include "guard_place.h"

#define CHUNKS 30000u
#define READERS 12
#define KILLS_MIN 200
#define LIMIT_S 100

static struct place place;
static uint8_t *bitmap; /* shared by the daemons, as a presence file is */
static uint32_t *orphans_seen, *done; /* shared too */

static void fill(uint64_t offset, uint64_t length)
{
	unsigned int chunk, end = (unsigned int)((offset + length + CHUNK - 1) / CHUNK);

	for (chunk = (unsigned int)(offset / CHUNK); chunk < end && chunk < CHUNKS; chunk++) {
		place_fill(&place, chunk);
		set_bit(bitmap, chunk);
		__atomic_fetch_add(done, 1, __ATOMIC_RELAXED);
	}
}

/* Those whose numbers are kept can be settled while new events are taken already. */
static void settle_orphans(ember_guard *guard, bool reserved)
{
	ember_orphan orphans[64];
	int i, count = ember_guard_orphans(guard, orphans, 64);

	CHECK(count >= 0 && count < 64);
	for (i = 0; i < count; i++) {
		if ((bool)orphans[i].reserved != reserved)
			continue;
		CHECK(orphans[i].inode == 0 || orphans[i].inode == place.inode);
		CHECK(!orphans[i].whole);
		fill(orphans[i].offset, orphans[i].length);
		CHECK_EQ(ember_guard_settle(guard, orphans[i].entry, 0), 0);
		__atomic_fetch_add(orphans_seen + reserved, 1, __ATOMIC_RELAXED);
	}
}

static void serve(void)
{
	ember_guard *guard;
	struct pollfd polled = { .events = POLLIN };
	ember_miss misses[16];
	int i, count;

	CHECK_EQ(ember_guard_open(&guard, place.group, place.journal, place.device, 64), 0);
	settle_orphans(guard, false);
	CHECK_EQ(ember_guard_add(guard, place.inode, bitmap, CHUNKS / 8 + 1, CHUNK,
				 (uint64_t)CHUNKS * CHUNK), 0);
	CHECK_EQ(ember_guard_start(guard), 0);
	settle_orphans(guard, true);
	polled.fd = ember_guard_eventfd(guard);
	for (;;) {
		poll(&polled, 1, -1);
		count = ember_guard_misses(guard, misses, 16);
		for (i = 0; i < count; i++) {
			CHECK_EQ(misses[i].inode, place.inode);
			fill(misses[i].offset, misses[i].length);
			CHECK_EQ(ember_guard_answer(guard, misses[i].token, 0), 0);
		}
	}
}

static pid_t start_daemon(void)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		serve();
		_exit(0);
	}
	return child;
}

/* Takes readers that have ended out of the list; returns how many are left. */
static int collect(pid_t *readers, int count)
{
	int i, status;

	for (i = count; i-- > 0;) {
		if (waitpid(readers[i], &status, WNOHANG) != readers[i])
			continue;
		CHECK(WIFEXITED(status));
		CHECK_EQ(WEXITSTATUS(status), 0);
		readers[i] = readers[--count];
	}
	return count;
}

int main(void)
{
	pid_t readers[READERS], daemon;
	int i, left = READERS, kills = 0, idle = 0, status;
	uint32_t before = 0;
	time_t end = time(NULL) + LIMIT_S;

	place_make(&place, 1024, CHUNKS);
	bitmap = mmap(NULL, CHUNKS / 8 + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	orphans_seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(bitmap != MAP_FAILED && orphans_seen != MAP_FAILED);
	done = orphans_seen + 64;
	srandom(7);
	for (i = 0; i < READERS; i++)
		readers[i] = place_reader(&place, (unsigned int)i, READERS, CHUNKS);
	while (left > 0 && time(NULL) < end) {
		daemon = start_daemon();
		/* Longer lives where even the start takes longer, as under a sanitizer. */
		usleep((useconds_t)((200 + random() % 3000) << (idle < 8 ? idle : 8)));
		/* A daemon that found something wrong has ended by itself. */
		CHECK_EQ(waitpid(daemon, &status, WNOHANG), 0);
		CHECK_EQ(kill(daemon, SIGKILL), 0);
		CHECK_EQ(waitpid(daemon, &status, 0), daemon);
		kills++;
		idle = *done == before ? idle + 1 : idle / 2;
		before = *done;
		left = collect(readers, left);
	}
	for (i = 0; i < left; i++)
		kill(readers[i], SIGKILL);
	printf("guard: %d daemons killed, %u + %u orphans settled, %d readers stuck\n", kills,
	       orphans_seen[0], orphans_seen[1], left);
	CHECK_EQ(left, 0);
	CHECK(kills >= KILLS_MIN && orphans_seen[1] > 0);
	place_remove(&place);
	return 0;
}
