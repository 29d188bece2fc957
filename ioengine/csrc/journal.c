/*
 * The journal's file: creating, mapping and reading it, and clearing what was answered.
 *
 * Invariant: at any instruction a kill -9 leaves every event that was taken and not answered in
 * exactly one slot, and a slot that is partly cleared reads as answered or empty, never as alive.
 */
#include "journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fanotify_abi.h"

#define JOURNAL_MAGIC 0x4c4e524a52424d45ull /* "EMBRJRNL", little endian */
#define JOURNAL_VERSION 1u

struct journal_header {
	uint64_t magic;
	uint32_t version;
	uint32_t slots;
	uint32_t slot_bytes;
	uint8_t zero[44];
};

_Static_assert(sizeof(struct journal_slot) == 64, "a slot is a cache line");
_Static_assert(sizeof(struct journal_header) == 64, "the header is one slot");
_Static_assert(sizeof(struct fanotify_event_metadata) == 24, "two events without range fit");
_Static_assert(sizeof(struct ember_range_record) == 24, "an event with its range fits");

static size_t file_bytes(uint32_t slots)
{
	return ((size_t)slots + 1) * sizeof(struct journal_slot);
}

int journal_create(uint32_t slots)
{
	struct journal_header header = {
		.magic = JOURNAL_MAGIC,
		.version = JOURNAL_VERSION,
		.slots = slots,
		.slot_bytes = sizeof(struct journal_slot),
	};
	int fd, ret;

	if (slots == 0 || slots > JOURNAL_SLOTS_MAX)
		return -EINVAL;
	fd = memfd_create("ember-journal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	/* Allocated now and sealed: neither a full machine nor a truncation may bring SIGBUS. */
	ret = -posix_fallocate(fd, 0, (off_t)file_bytes(slots));
	if (ret)
		goto out;
	if (pwrite(fd, &header, sizeof(header), 0) != (ssize_t)sizeof(header) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		ret = -errno;
out:
	if (ret) {
		close(fd);
		return ret;
	}
	return fd;
}

static int check_header(int descriptor, uint32_t *slots)
{
	struct journal_header header;
	struct stat st;
	ssize_t got = pread(descriptor, &header, sizeof(header), 0);

	if (got < 0 || fstat(descriptor, &st) < 0)
		return -errno;
	if (got != (ssize_t)sizeof(header) || header.magic != JOURNAL_MAGIC ||
	    header.version != JOURNAL_VERSION ||
	    header.slot_bytes != sizeof(struct journal_slot) || header.slots == 0 ||
	    header.slots > JOURNAL_SLOTS_MAX || (size_t)st.st_size != file_bytes(header.slots))
		return -EPROTO;
	*slots = header.slots;
	return 0;
}

/*
 * The descriptor itself is shared with the keeper, and so would be a flock on it. A file opened
 * anew has its own, and the kernel drops that only when the last thread of its process is gone:
 * then no read of the group can be under way any more.
 */
static int take_lock(int descriptor)
{
	char path[64];
	int fd, ret;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", descriptor);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		ret = errno == EWOULDBLOCK ? -EBUSY : -errno;
		close(fd);
		return ret;
	}
	return fd;
}

int journal_map(struct journal *journal, int descriptor)
{
	uint32_t count = 0;
	int lock, ret = check_header(descriptor, &count);
	void *base;

	if (ret < 0)
		return ret;
	lock = take_lock(descriptor);
	if (lock < 0)
		return lock;
	base = mmap(NULL, file_bytes(count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
		    descriptor, 0);
	if (base == MAP_FAILED) {
		ret = -errno;
		close(lock);
		return ret;
	}
	/*
	 * A page fault in the middle of read(2) can fail in a process that is being killed, and the
	 * kernel would then deny the event. Locked pages do not fault; where that is forbidden they
	 * are at least all present now.
	 */
	journal->locked = mlock(base, file_bytes(count)) == 0;
	journal->slots = (struct journal_slot *)base + 1;
	journal->count = count;
	journal->lock = lock;
	return 0;
}

void journal_unmap(struct journal *journal)
{
	if (!journal->slots)
		return;
	munmap(journal->slots - 1, file_bytes(journal->count));
	close(journal->lock);
	journal->slots = NULL;
}

static struct fanotify_event_metadata *metadata(const struct journal *journal, uint32_t entry)
{
	struct journal_slot *slot = &journal->slots[entry / 2];

	return (struct fanotify_event_metadata *)(slot->raw + (entry % 2) * FAN_EVENT_METADATA_LEN);
}

unsigned int journal_events(const struct journal *journal, uint32_t slot)
{
	uint32_t first = __atomic_load_n(&metadata(journal, slot * 2)->event_len, __ATOMIC_ACQUIRE);

	if (first == 0)
		return 0;
	if (first != FAN_EVENT_METADATA_LEN)
		return 1;
	return metadata(journal, slot * 2 + 1)->event_len == FAN_EVENT_METADATA_LEN ? 2 : 1;
}

struct journal_event journal_event(const struct journal *journal, uint32_t entry)
{
	const struct fanotify_event_metadata *data = metadata(journal, entry);
	const struct ember_range_record *range = (const void *)(data + 1);
	struct journal_event event = {
		.descriptor = __atomic_load_n(&data->fd, __ATOMIC_ACQUIRE),
		.pid = data->pid,
		.whole = true,
	};

	event.strange = data->vers != FANOTIFY_METADATA_VERSION || !(data->mask & FAN_PRE_ACCESS);
	if (entry % 2 == 0 && data->event_len >= JOURNAL_EVENT_BYTES &&
	    range->type == FAN_EVENT_INFO_TYPE_RANGE) {
		event.whole = false;
		event.offset = range->offset;
		event.length = range->count;
	}
	return event;
}

void journal_reset(struct journal *journal, uint32_t slot)
{
	/* The length first: from then on the slot counts as empty, whatever is left in it. */
	__atomic_store_n(&metadata(journal, slot * 2)->event_len, 0, __ATOMIC_SEQ_CST);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	memset(&journal->slots[slot], 0, sizeof(journal->slots[slot]));
}

bool journal_clear(struct journal *journal, uint32_t entry)
{
	uint32_t slot = entry / 2;
	unsigned int half;

	__atomic_store_n(&metadata(journal, entry)->fd, FAN_NOFD, __ATOMIC_RELEASE);
	for (half = 0; half < journal_events(journal, slot); half++)
		if (metadata(journal, slot * 2 + half)->fd != FAN_NOFD)
			return false;
	journal_reset(journal, slot);
	return true;
}
