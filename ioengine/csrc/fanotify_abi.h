/*
 * The part of the kernel's fanotify interface that headers of Linux 6.1 do not have yet.
 * Values: include/uapi/linux/fanotify.h of Linux 6.14.
 */
#ifndef EMBER_FANOTIFY_ABI_H
#define EMBER_FANOTIFY_ABI_H

#include <stdint.h>
#include <sys/fanotify.h>

#ifndef FAN_PRE_ACCESS
#define FAN_PRE_ACCESS 0x00100000
#endif
#ifndef FAN_MARK_IGNORE
#define FAN_MARK_IGNORE 0x00000400
#endif
#ifndef FAN_EVENT_INFO_TYPE_RANGE
#define FAN_EVENT_INFO_TYPE_RANGE 6
#endif

struct ember_range_record {
	uint8_t type;
	uint8_t pad;
	uint16_t length;
	uint32_t pad2;
	uint64_t offset;
	uint64_t count;
};

/* FAN_ALLOW, or FAN_DENY with the error that the reader shall see. */
static inline uint32_t ember_response(int error)
{
	return error == 0 ? FAN_ALLOW : (FAN_DENY | ((uint32_t)(error & 0xff) << 24));
}

#endif
