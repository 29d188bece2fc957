/*
 * The guard in one process: answers by itself, hands on misses, keeps to its limits, and may be
 * used by several threads at once (the thread sanitizer watches).
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/resource.h>

#include "guard_place.h"

#define CHUNKS 4096u
#define LENGTH ((uint64_t)CHUNKS * CHUNK)

static uint8_t bitmap[CHUNKS / 8];

static ember_guard *open_guard(const struct place *place, uint32_t reserve)
{
	ember_guard *guard = NULL;

	CHECK_EQ(ember_guard_open(&guard, place->group, place->journal, place->device, reserve), 0);
	return guard;
}

static int wait_misses(ember_guard *guard, ember_miss *misses, uint32_t room, int timeout_ms)
{
	struct pollfd polled = { .fd = ember_guard_eventfd(guard), .events = POLLIN };

	return poll(&polled, 1, timeout_ms) == 1 ? ember_guard_misses(guard, misses, room) : 0;
}

static void fill_miss(const struct place *place, const ember_miss *miss)
{
	uint64_t at;

	for (at = miss->offset; at < miss->offset + miss->length; at += CHUNK)
		place_fill(place, (unsigned int)(at / CHUNK));
}

/* The thread counts an event after it has answered: its reader can be done a moment earlier. */
static void count_when_settled(ember_guard *guard, ember_guard_counts *counts)
{
	for (int turn = 0; turn < 2000; turn++) {
		ember_guard_count(guard, counts);
		if (counts->outstanding == 0 &&
		    counts->allowed + counts->misses + counts->denied >= counts->events)
			return;
		usleep(1000);
	}
}

static void readable_chunks_are_answered_by_the_thread(void)
{
	ember_guard_counts counts;
	ember_guard *guard;
	struct place place;
	pid_t reader;

	place_make(&place, 64, CHUNKS);
	guard = open_guard(&place, 16);
	for (unsigned int chunk = 0; chunk < 100; chunk++) {
		place_fill(&place, chunk);
		set_bit(bitmap, chunk);
	}
	CHECK_EQ(ember_guard_add(guard, place.inode, bitmap, sizeof(bitmap), CHUNK, LENGTH), 0);
	reader = place_reader(&place, 0, 1, 100);
	CHECK_EQ(ember_guard_start(guard), 0);
	CHECK_EQ(ember_guard_start(guard), -EALREADY);
	CHECK_EQ(place_result(reader), 0);
	count_when_settled(guard, &counts);
	CHECK_EQ(counts.events, 100);
	CHECK_EQ(counts.allowed, 100);
	CHECK_EQ(counts.misses + counts.denied + counts.outstanding + counts.read_errors, 0);
	CHECK_EQ(ember_guard_remove(guard, place.inode), 0);
	CHECK_EQ(ember_guard_remove(guard, place.inode), -ENOENT);
	ember_guard_close(guard);
	place_remove(&place);
}

static void a_miss_is_answered_once(void)
{
	ember_guard *guard, *other;
	ember_miss miss;
	struct place place;
	pid_t reader;

	place_make(&place, 64, CHUNKS);
	guard = open_guard(&place, 16);
	CHECK_EQ(ember_guard_open(&other, place.group, place.journal, place.device, 16), -EBUSY);
	CHECK(other == NULL);
	reader = place_reader(&place, 5, 1, 6);
	CHECK_EQ(ember_guard_start(guard), 0);
	CHECK_EQ(wait_misses(guard, &miss, 1, 10000), 1);
	CHECK_EQ(miss.inode, place.inode);
	CHECK_EQ(miss.offset, 5 * CHUNK);
	CHECK_EQ(miss.length, CHUNK);
	CHECK_EQ(miss.known, 0);
	CHECK_EQ(miss.pid, reader);
	CHECK_EQ(ember_guard_answer(guard, miss.token, 1000), -EINVAL);
	CHECK_EQ(ember_guard_answer(guard, miss.token, ETIMEDOUT), -EINVAL);
	place_fill(&place, 5);
	CHECK_EQ(ember_guard_answer(guard, miss.token, 0), 0);
	CHECK_EQ(ember_guard_answer(guard, miss.token, 0), -ESTALE);
	CHECK_EQ(ember_guard_answer(guard, UINT64_MAX, 0), -EINVAL);
	CHECK_EQ(place_result(reader), 0);
	ember_guard_close(guard);
	place_remove(&place);
}

/* What is here and what is not, asked for by many at once: the thread takes both in one go. */
static void a_crowd_is_answered_in_batches(void)
{
	enum { READERS = 24, READ = 480 };
	ember_miss misses[READERS];
	ember_guard_counts counts;
	pid_t readers[READERS];
	ember_guard *guard;
	struct place place;
	int i, count, left = READ / 2;

	memset(bitmap, 0, sizeof(bitmap));
	place_make(&place, 64, CHUNKS);
	guard = open_guard(&place, 16);
	for (unsigned int chunk = 0; chunk < READ; chunk += 2) {
		place_fill(&place, chunk);
		set_bit(bitmap, chunk);
	}
	CHECK_EQ(ember_guard_add(guard, place.inode, bitmap, sizeof(bitmap), CHUNK, LENGTH), 0);
	for (i = 0; i < READERS; i++)
		readers[i] = place_reader(&place, (unsigned int)i * (READ / READERS), 1,
					  (unsigned int)(i + 1) * (READ / READERS));
	CHECK_EQ(ember_guard_start(guard), 0);
	while (left > 0) {
		count = wait_misses(guard, misses, READERS, 10000);
		CHECK(count > 0);
		for (i = 0; i < count; i++) {
			fill_miss(&place, &misses[i]);
			CHECK_EQ(ember_guard_answer(guard, misses[i].token, 0), 0);
		}
		left -= count;
	}
	for (i = 0; i < READERS; i++)
		CHECK_EQ(place_result(readers[i]), 0);
	count_when_settled(guard, &counts);
	CHECK_EQ(counts.events, READ);
	CHECK_EQ(counts.allowed, READ / 2);
	CHECK_EQ(counts.misses, READ / 2);
	CHECK_EQ(counts.denied + counts.outstanding + counts.read_errors, 0);
	ember_guard_close(guard);
	place_remove(&place);
}

/* More readers than there are descriptors or slots: they take turns, and none is denied. */
static void readers_beyond_the_limits_wait_their_turn(uint32_t slots, rlim_t descriptors)
{
	enum { WAITERS = 150 };
	struct rlimit before, limit;
	ember_guard_counts counts;
	pid_t readers[WAITERS];
	ember_guard *guard;
	ember_miss misses[WAITERS];
	struct place place;
	uint32_t most = 0;
	int i, count, answered = 0;

	place_make(&place, slots, CHUNKS);
	for (i = 0; i < WAITERS; i++)
		readers[i] = place_reader(&place, (unsigned int)i, CHUNKS, CHUNKS);
	CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
	limit = before;
	limit.rlim_cur = descriptors;
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
	guard = open_guard(&place, 32);
	CHECK_EQ(ember_guard_start(guard), 0);
	while (answered < WAITERS) {
		usleep(20000); /* let as many come as the limits allow */
		count = wait_misses(guard, misses, WAITERS, 10000);
		ember_guard_count(guard, &counts);
		CHECK(count > 0);
		if (counts.outstanding > most)
			most = counts.outstanding;
		for (i = 0; i < count; i++) {
			fill_miss(&place, &misses[i]);
			CHECK_EQ(ember_guard_answer(guard, misses[i].token, 0), 0);
		}
		answered += count;
	}
	for (i = 0; i < WAITERS; i++)
		CHECK_EQ(place_result(readers[i]), 0);
	count_when_settled(guard, &counts);
	CHECK(most > 1 && most <= slots && most <= descriptors - 32);
	CHECK(counts.pauses > 0);
	CHECK_EQ(counts.read_errors, 0);
	CHECK_EQ(counts.outstanding, 0);
	ember_guard_close(guard);
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
	place_remove(&place);
}

/* Descriptors that the rest of the process holds count too, though no event waits yet. */
static void no_event_is_taken_while_the_process_is_out_of_descriptors(void)
{
	struct rlimit before, limit;
	ember_guard_counts counts;
	ember_guard *guard;
	ember_miss miss;
	struct place place;
	int taken[64], i;
	pid_t reader;

	place_make(&place, 16, CHUNKS);
	reader = place_reader(&place, 0, CHUNKS, CHUNKS);
	guard = open_guard(&place, 16);
	CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
	limit = before;
	limit.rlim_cur = 64;
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
	for (i = 0; i < 64; i++)
		taken[i] = dup(place.view);
	CHECK_EQ(taken[63], -1);
	CHECK_EQ(ember_guard_start(guard), 0);
	CHECK_EQ(wait_misses(guard, &miss, 1, 300), 0);
	for (i = 0; i < 64; i++)
		if (taken[i] >= 0)
			close(taken[i]);
	CHECK_EQ(wait_misses(guard, &miss, 1, 10000), 1); /* it looks again by itself */
	place_fill(&place, 0);
	CHECK_EQ(ember_guard_answer(guard, miss.token, 0), 0);
	CHECK_EQ(place_result(reader), 0);
	ember_guard_count(guard, &counts);
	CHECK_EQ(counts.read_errors, 0);
	ember_guard_close(guard);
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
	place_remove(&place);
}

struct crew {
	struct place *place;
	ember_guard *guard;
	atomic_bool done;
};

static void *answer_misses(void *argument)
{
	struct crew *crew = argument;
	ember_miss misses[4];

	while (!atomic_load(&crew->done)) {
		int i, count = wait_misses(crew->guard, misses, 4, 10);

		for (i = 0; i < count; i++) {
			fill_miss(crew->place, &misses[i]);
			CHECK_EQ(ember_guard_answer(crew->guard, misses[i].token, 0), 0);
		}
	}
	return NULL;
}

static void *change_views(void *argument)
{
	struct crew *crew = argument;
	uint64_t length = LENGTH;

	for (uint64_t round = 0; !atomic_load(&crew->done); round++) {
		uint64_t other = crew->place->inode + 1 + round % 200;

		CHECK_EQ(ember_guard_add(crew->guard, other, bitmap, sizeof(bitmap), CHUNK, 9), 0);
		CHECK_EQ(ember_guard_add(crew->guard, crew->place->inode, bitmap, sizeof(bitmap),
					 CHUNK, length), 0);
		CHECK_EQ(ember_guard_remove(crew->guard, crew->place->inode), 0);
		CHECK_EQ(ember_guard_remove(crew->guard, other), 0);
		usleep(50);
	}
	return NULL;
}

static void many_threads_may_answer_and_register(void)
{
	enum { READERS = 8, ANSWERERS = 3 };
	pthread_t answerers[ANSWERERS], changer;
	struct crew crew = { .done = false };
	ember_guard_counts counts;
	pid_t readers[READERS];
	struct place place;
	int i;

	place_make(&place, 64, CHUNKS);
	memset(bitmap, 0, sizeof(bitmap));
	for (i = 0; i < READERS; i++)
		readers[i] = place_reader(&place, (unsigned int)i, READERS, CHUNKS / 2);
	crew.place = &place;
	crew.guard = open_guard(&place, 16);
	for (i = 0; i < ANSWERERS; i++)
		CHECK_EQ(pthread_create(&answerers[i], NULL, answer_misses, &crew), 0);
	CHECK_EQ(pthread_create(&changer, NULL, change_views, &crew), 0);
	for (i = 0; i < 20; i++) { /* stopping and starting loses nothing */
		CHECK_EQ(ember_guard_start(crew.guard), 0);
		usleep(2000);
		CHECK_EQ(ember_guard_stop(crew.guard), 0);
	}
	CHECK_EQ(ember_guard_start(crew.guard), 0);
	for (i = 0; i < READERS; i++)
		CHECK_EQ(place_result(readers[i]), 0);
	atomic_store(&crew.done, true);
	for (i = 0; i < ANSWERERS; i++)
		CHECK_EQ(pthread_join(answerers[i], NULL), 0);
	CHECK_EQ(pthread_join(changer, NULL), 0);
	count_when_settled(crew.guard, &counts);
	CHECK_EQ(counts.outstanding, 0);
	CHECK_EQ(counts.misses + counts.allowed, counts.events);
	ember_guard_close(crew.guard);
	place_remove(&place);
}

int main(void)
{
	alarm(90); /* a hang is a failure too */
	ember_guard_close(NULL);
	readable_chunks_are_answered_by_the_thread();
	a_miss_is_answered_once();
	a_crowd_is_answered_in_batches();
	readers_beyond_the_limits_wait_their_turn(16, 1024);
	readers_beyond_the_limits_wait_their_turn(1024, 100);
	no_event_is_taken_while_the_process_is_out_of_descriptors();
	many_threads_may_answer_and_register();
	return 0;
}
