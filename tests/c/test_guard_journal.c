/*
 * The journal and the table of views by themselves: what a successor reads in slots that were left
 * at any point, and which ranges count as readable. Needs no kernel feature but memfd.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "ember_io.h"
#include "fanotify_abi.h"
#include "journal.h"
#include "views.h"

static void write_event(struct journal *journal, uint32_t entry, int descriptor, bool ranged)
{
	uint8_t *at = journal->slots[entry / 2].raw + (entry % 2) * 24;
	struct fanotify_event_metadata data = {
		.event_len = ranged ? 48 : 24,
		.vers = FANOTIFY_METADATA_VERSION,
		.metadata_len = 24,
		.mask = FAN_PRE_ACCESS,
		.fd = descriptor,
		.pid = 7,
	};
	struct ember_range_record range = {
		.type = FAN_EVENT_INFO_TYPE_RANGE,
		.length = 24,
		.offset = 1ull << 40,
		.count = 4096,
	};

	memcpy(at, &data, sizeof(data));
	if (ranged)
		memcpy(at + 24, &range, sizeof(range));
}

static void a_slot_holds_one_event_with_range_or_two_without(void)
{
	static const uint8_t zeros[64];
	struct journal journal = { 0 };
	int fd = ember_guard_journal(4);

	CHECK_EQ(journal_map(&journal, fd), 0);
	CHECK_EQ(journal.count, 4);
	CHECK_EQ(journal_events(&journal, 0), 0);
	write_event(&journal, 0, 11, true);
	CHECK_EQ(journal_events(&journal, 0), 1);
	CHECK_EQ(journal_event(&journal, 0).offset, 1ll << 40);
	CHECK_EQ(journal_event(&journal, 0).length, 4096);
	CHECK_EQ(journal_event(&journal, 0).descriptor, 11);
	CHECK(!journal_event(&journal, 0).whole && !journal_event(&journal, 0).strange);
	CHECK(journal_clear(&journal, 0));
	CHECK(memcmp(&journal.slots[0], zeros, 64) == 0);
	write_event(&journal, 2, 12, false);
	write_event(&journal, 3, 13, false);
	CHECK_EQ(journal_events(&journal, 1), 2);
	CHECK(journal_event(&journal, 2).whole && journal_event(&journal, 3).whole);
	CHECK_EQ(journal_event(&journal, 3).descriptor, 13);
	CHECK(!journal_clear(&journal, 2));
	CHECK_EQ(journal_event(&journal, 2).descriptor, FAN_NOFD);
	CHECK_EQ(journal_event(&journal, 3).descriptor, 13);
	CHECK(journal_clear(&journal, 3));
	CHECK(memcmp(&journal.slots[1], zeros, 64) == 0);
	journal_unmap(&journal);
	journal_unmap(&journal);
	close(fd);
}

static void a_successor_finds_what_is_alive_and_nothing_else(void)
{
	struct journal journal = { 0 };
	int fd = ember_guard_journal(8), group = ember_guard_group();
	ember_orphan orphans[8];
	ember_guard *guard;

	CHECK(group >= 0);
	CHECK_EQ(journal_map(&journal, fd), 0);
	write_event(&journal, 0, 311, true);
	journal.slots[0].inode[0] = 42;
	write_event(&journal, 4, FAN_NOFD, false); /* answered, its slot not yet cleared */
	write_event(&journal, 8, 312, false);
	write_event(&journal, 9, FAN_NOFD, false);
	journal.slots[5].raw[16] = 9; /* half cleared: no length, so no event */
	journal_unmap(&journal);
	CHECK_EQ(dup2(fd, 311), 311); /* a number that something else has by now */
	CHECK_EQ(ember_guard_open(&guard, group, fd, 1, 16), 0);
	CHECK_EQ(ember_guard_start(guard), -EBUSY);
	CHECK_EQ(ember_guard_orphans(guard, orphans, 8), 2);
	CHECK_EQ(orphans[0].inode, 42);
	CHECK_EQ(orphans[0].descriptor, 311);
	CHECK(!orphans[0].reserved);
	CHECK_EQ(orphans[1].inode, 0);
	CHECK_EQ(orphans[1].descriptor, 312);
	CHECK_EQ(orphans[1].whole, 1);
	CHECK(orphans[1].reserved);
	CHECK_EQ(fcntl(312, F_GETFD), FD_CLOEXEC); /* nobody else can get it */
	/* The kernel knows no such events: nobody waits, so settling them is no error. */
	CHECK_EQ(ember_guard_settle(guard, orphans[0].entry, 0), 0);
	CHECK_EQ(ember_guard_settle(guard, orphans[0].entry, 0), -ESTALE);
	CHECK_EQ(fcntl(311, F_GETFD), 0); /* not ours, so it stays open */
	CHECK_EQ(ember_guard_settle(guard, 999, 0), -EINVAL);
	CHECK_EQ(ember_guard_start(guard), 0);
	CHECK_EQ(fcntl(312, F_GETFD), FD_CLOEXEC);
	CHECK_EQ(ember_guard_settle(guard, orphans[1].entry, EIO), 0);
	CHECK_EQ(fcntl(312, F_GETFD), -1);
	ember_guard_close(guard);
	close(311);
	CHECK_EQ(ember_guard_open(&guard, group, fd, 1, 16), 0);
	CHECK_EQ(ember_guard_orphans(guard, orphans, 8), 0);
	ember_guard_close(guard);
	close(group);
	close(fd);
}

static void what_is_no_journal_is_refused(void)
{
	struct journal journal = { 0 };
	char name[] = "/tmp/ember-journal-XXXXXX";
	int fd = ember_guard_journal(4), file;
	uint32_t version = 99;

	CHECK_EQ(ember_guard_journal(0), -EINVAL);
	CHECK_EQ(ember_guard_journal((1u << 20) + 1), -EINVAL);
	CHECK_EQ(ftruncate(fd, 64), -1); /* sealed: nobody can pull the pages away */
	CHECK_EQ(pwrite(fd, &version, 4, 8), 4);
	CHECK_EQ(journal_map(&journal, fd), -EPROTO);
	close(fd);
	file = mkstemp(name);
	CHECK(file >= 0);
	unlink(name);
	CHECK_EQ(journal_map(&journal, file), -EPROTO);
	close(file);
	CHECK(journal_map(&journal, file) < 0);
}

static uint64_t checked(struct views *views, uint64_t offset, uint64_t length,
			enum view_answer expected)
{
	struct reading reading;

	CHECK_EQ(views_check(views, 5, offset, &length, &reading), expected);
	return length;
}

static void a_range_is_readable_when_all_its_chunks_are(void)
{
	uint8_t bitmap[4] = { 0xff, 0xff, 0x7f, 0x01 }; /* chunk 23 is missing, 24 the last */
	struct views views;

	CHECK_EQ(views_init(&views), 0);
	checked(&views, 0, 1, VIEW_UNKNOWN);
	CHECK_EQ(views_add(&views, 0, bitmap, 4, 10, 245), -EINVAL);
	CHECK_EQ(views_add(&views, 5, bitmap, 4, 0, 245), -EINVAL);
	CHECK_EQ(views_add(&views, 5, bitmap, 3, 10, 245), -EINVAL);
	CHECK_EQ(views_add(&views, 5, NULL, 4, 10, 245), -EINVAL);
	CHECK_EQ(views_add(&views, 5, bitmap, 4, 10, 245), 0);
	checked(&views, 0, 230, VIEW_READABLE);
	checked(&views, 0, 231, VIEW_MISSING);
	checked(&views, 229, 1, VIEW_READABLE);
	checked(&views, 229, 2, VIEW_MISSING);
	checked(&views, 239, 1, VIEW_MISSING);
	CHECK_EQ(checked(&views, 240, 4096, VIEW_READABLE), 5);
	CHECK_EQ(checked(&views, 245, 4096, VIEW_READABLE), 0);
	CHECK_EQ(checked(&views, UINT64_MAX, UINT64_MAX, VIEW_READABLE), 0);
	checked(&views, 235, UINT64_MAX, VIEW_MISSING);
	checked(&views, 3, 0, VIEW_READABLE);
	CHECK_EQ(views_add(&views, 5, NULL, 0, 10, 0), 0); /* replaced by an empty one */
	checked(&views, 0, 4096, VIEW_READABLE);
	views_free(&views);
}

static void views_come_and_go_in_any_order(void)
{
	struct reading reading;
	uint8_t set = 1, clear = 0;
	struct views views;
	uint64_t length, i;

	CHECK_EQ(views_init(&views), 0);
	for (i = 0; i < 1000; i++) {
		uint64_t inode = 1 + i * 613 % 1000;

		CHECK_EQ(views_add(&views, inode, inode % 2 ? &set : &clear, 1, 4096, 4096), 0);
	}
	for (i = 1; i <= 1000; i += 3)
		CHECK_EQ(views_remove(&views, i), 0);
	CHECK_EQ(views_remove(&views, 1), -ENOENT);
	for (i = 1; i <= 1000; i++) {
		enum view_answer expected = i % 2 ? VIEW_READABLE : VIEW_MISSING;

		if (i % 3 == 1)
			expected = VIEW_UNKNOWN;
		length = 1;
		CHECK_EQ(views_check(&views, i, 0, &length, &reading), expected);
	}
	views_free(&views);
}

int main(void)
{
	a_slot_holds_one_event_with_range_or_two_without();
	a_successor_finds_what_is_alive_and_nothing_else();
	what_is_no_journal_is_refused();
	a_range_is_readable_when_all_its_chunks_are();
	views_come_and_go_in_any_order();
	return 0;
}
