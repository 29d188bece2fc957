/*
 * A view and a private, marked bind mount for tests of the guard, in a mount namespace of the
 * test's own: whatever goes wrong, the mount dies with the processes. Needs root.
 */
#ifndef EMBER_GUARD_PLACE_H
#define EMBER_GUARD_PLACE_H

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "ember_io.h"

#define CHUNK 4096u

struct place {
	char views[64];
	char guarded[64];
	int view; /* the view file by its unmarked path */
	uint64_t inode;
	uint64_t device;
	int group;
	int journal;
};

static inline void place_make(struct place *place, uint32_t slots, unsigned int chunks)
{
	char root[] = "/var/tmp/ember-guard-c-XXXXXX", path[96];
	struct stat st;

	CHECK_EQ(unshare(CLONE_NEWNS), 0);
	CHECK_EQ(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
	CHECK(mkdtemp(root));
	snprintf(place->views, sizeof(place->views), "%s/views", root);
	snprintf(place->guarded, sizeof(place->guarded), "%s/guarded", root);
	CHECK_EQ(mkdir(place->views, 0700), 0);
	CHECK_EQ(mkdir(place->guarded, 0700), 0);
	CHECK_EQ(mount(place->views, place->guarded, NULL, MS_BIND, NULL), 0);
	snprintf(path, sizeof(path), "%s/v", place->views);
	place->view = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(place->view >= 0);
	CHECK_EQ(ftruncate(place->view, (off_t)chunks * CHUNK), 0);
	CHECK_EQ(fstat(place->view, &st), 0);
	place->inode = st.st_ino;
	place->device = st.st_dev;
	place->group = ember_guard_group();
	CHECK(place->group >= 0);
	place->journal = ember_guard_journal(slots);
	CHECK(place->journal >= 0);
	CHECK_EQ(ember_guard_mark(place->group, place->guarded), 0);
}

static inline void place_remove(struct place *place)
{
	char path[96];

	close(place->group);
	close(place->journal);
	close(place->view);
	CHECK_EQ(umount2(place->guarded, MNT_DETACH), 0);
	snprintf(path, sizeof(path), "%s/v", place->views);
	CHECK_EQ(unlink(path), 0);
	CHECK_EQ(rmdir(place->views), 0);
	CHECK_EQ(rmdir(place->guarded), 0);
	*strrchr(place->views, '/') = 0;
	CHECK_EQ(rmdir(place->views), 0);
}

/* Every chunk has words of its own; none of them is zero. */
static inline uint32_t place_word(unsigned int chunk)
{
	return chunk * 2654435761u | 1u;
}

static inline void place_fill(const struct place *place, unsigned int chunk)
{
	uint32_t words[CHUNK / 4];

	for (unsigned int i = 0; i < CHUNK / 4; i++)
		words[i] = place_word(chunk);
	CHECK_EQ(pwrite(place->view, words, CHUNK, (off_t)chunk * CHUNK), CHUNK);
}

static inline int place_open(const struct place *place)
{
	char path[96];
	int fd;

	snprintf(path, sizeof(path), "%s/v", place->guarded);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM), 0);
	return fd;
}

/* What a reader found: 0 the right bytes, 1 an error, 2 wrong bytes. */
static inline int place_read(int fd, unsigned int chunk)
{
	uint32_t words[CHUNK / 4];

	if (pread(fd, words, CHUNK, (off_t)chunk * CHUNK) != CHUNK)
		return 1;
	for (unsigned int i = 0; i < CHUNK / 4; i++)
		if (words[i] != place_word(chunk))
			return 2;
	return 0;
}

/* A process that reads chunks first, first + step, … below end, and ends with what it found. */
static inline pid_t place_reader(const struct place *place, unsigned int first, unsigned int step,
				 unsigned int end)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		int fd = place_open(place), found = 0;

		for (unsigned int chunk = first; chunk < end && !found; chunk += step)
			found = place_read(fd, chunk);
		_exit(found);
	}
	return child;
}

static inline int place_result(pid_t child)
{
	int status;

	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static inline void set_bit(uint8_t *bitmap, unsigned int chunk)
{
	__atomic_fetch_or(&bitmap[chunk / 8], 1u << (chunk % 8), __ATOMIC_RELEASE);
}

#endif
