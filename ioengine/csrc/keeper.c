/*
 * ember-keeper: holds descriptors for a daemon that may die, and does nothing else.
 *
 *     ember-keeper [--foreground] [--cgroup NAME] SOCKET
 *
 * While it lives, the fanotify group it holds stays open, and no read of an absent chunk is let
 * through. It outlives the daemon: its own session and, with --cgroup, its own control group; all
 * signals that can be ignored are. It ends by SIGKILL, or by the verb `quit` once it holds nothing.
 *
 * One packet (SOCK_SEQPACKET) is one request or answer, words parted by blanks:
 *     ping                  -> ok PID OOM_SCORE_ADJ CGROUP     (CGROUP: own, shared)
 *     put NAME… + fds       -> ok              one descriptor for each name; replaces, all or none
 *     get NAME…             -> ok + fds        or: none NAME
 *     list                  -> ok NAME…
 *     drop NAME…            -> ok
 *     quit                  -> ok              or: busy
 * Anything else is answered `bad WHY`. Clients must run as the keeper's own user.
 */
#include "keeper.h"

#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define NAMES_MAX 64
#define NAME_BYTES 64
#define WORDS_MAX 16 /* names in one request; also the descriptors in one packet */
#define CLIENTS_MAX 64
#define PACKET_BYTES 8192

struct held {
	char name[NAME_BYTES];
	int fd;
};

static struct held held[NAMES_MAX];
static int held_count;
static struct pollfd polled[CLIENTS_MAX + 1]; /* [0] is the listening socket */
static int polled_count = 1;
static struct keeper_place settled;

static struct held *find(const char *name)
{
	for (int i = 0; i < held_count; i++)
		if (!strcmp(held[i].name, name))
			return &held[i];
	return NULL;
}

static bool good_name(const char *name)
{
	size_t length = strlen(name);

	for (size_t i = 0; i < length; i++)
		if (!isalnum((unsigned char)name[i]) && !strchr("-_.", name[i]))
			return false;
	return length > 0 && length < NAME_BYTES;
}

struct request {
	char *words[WORDS_MAX + 1]; /* [0] is the verb */
	int word_count;
	int fds[WORDS_MAX];
	int fd_count;
};

static void answer(int client, const char *text, const int *fds, int fd_count)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * WORDS_MAX)];
		struct cmsghdr align;
	} control = { 0 };
	struct iovec data = { .iov_base = (void *)text, .iov_len = strlen(text) };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };

	if (fd_count) {
		struct cmsghdr *header;

		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)fd_count);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)fd_count);
		memcpy(CMSG_DATA(header), fds, sizeof(int) * (size_t)fd_count);
	}
	/* A client that does not read its answers loses them; the keeper waits for nobody. */
	(void)!sendmsg(client, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void put(int client, struct request *request)
{
	int fresh = 0, i, j;

	if (request->word_count < 2 || request->fd_count != request->word_count - 1) {
		answer(client, "bad put needs one descriptor for each name", NULL, 0);
		return;
	}
	for (i = 1; i < request->word_count; i++) {
		for (j = 1; j < i; j++)
			if (!strcmp(request->words[i], request->words[j])) {
				answer(client, "bad put names one thing twice", NULL, 0);
				return;
			}
		fresh += !find(request->words[i]);
	}
	if (held_count + fresh > NAMES_MAX) {
		answer(client, "bad the keeper is full", NULL, 0);
		return;
	}
	for (i = 1; i < request->word_count; i++) {
		struct held *place = find(request->words[i]);

		if (place) {
			close(place->fd);
		} else {
			place = &held[held_count++];
			snprintf(place->name, sizeof(place->name), "%s", request->words[i]);
		}
		place->fd = request->fds[i - 1];
		request->fds[i - 1] = -1;
	}
	answer(client, "ok", NULL, 0);
}

static void get(int client, const struct request *request)
{
	int fds[WORDS_MAX], i;

	if (request->word_count < 2) {
		answer(client, "bad get needs a name", NULL, 0);
		return;
	}
	for (i = 1; i < request->word_count; i++) {
		const struct held *place = find(request->words[i]);

		if (!place) {
			char text[NAME_BYTES + 8];

			snprintf(text, sizeof(text), "none %s", request->words[i]);
			answer(client, text, NULL, 0);
			return;
		}
		fds[i - 1] = place->fd;
	}
	answer(client, "ok", fds, request->word_count - 1);
}

static void list(int client)
{
	char text[NAMES_MAX * (NAME_BYTES + 1) + 4] = "ok";
	size_t used = 2;

	for (int i = 0; i < held_count; i++)
		used += (size_t)snprintf(text + used, sizeof(text) - used, " %s", held[i].name);
	answer(client, text, NULL, 0);
}

static void drop(int client, const struct request *request)
{
	for (int i = 1; i < request->word_count; i++) {
		struct held *place = find(request->words[i]);

		if (!place)
			continue;
		close(place->fd);
		*place = held[--held_count];
	}
	answer(client, "ok", NULL, 0);
}

static void ping(int client)
{
	char text[64];

	snprintf(text, sizeof(text), "ok %d %d %s", getpid(), settled.oom_score_adj,
		 settled.own_cgroup ? "own" : "shared");
	answer(client, text, NULL, 0);
}

static void obey(int client, struct request *request)
{
	const char *verb = request->words[0];

	for (int i = 1; i < request->word_count; i++)
		if (!good_name(request->words[i])) {
			answer(client, "bad name", NULL, 0);
			return;
		}
	if (!strcmp(verb, "put")) {
		put(client, request);
	} else if (!strcmp(verb, "get")) {
		get(client, request);
	} else if (!strcmp(verb, "list")) {
		list(client);
	} else if (!strcmp(verb, "drop")) {
		drop(client, request);
	} else if (!strcmp(verb, "ping")) {
		ping(client);
	} else if (!strcmp(verb, "quit")) {
		answer(client, held_count ? "busy" : "ok", NULL, 0);
		if (!held_count)
			exit(0);
	} else {
		answer(client, "bad verb", NULL, 0);
	}
}

static void take_descriptors(struct msghdr *message, struct request *request)
{
	struct cmsghdr *header;

	for (header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
		size_t bytes, i;

		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		bytes = header->cmsg_len - CMSG_LEN(0);
		for (i = 0; i < bytes / sizeof(int); i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
			if (request->fd_count < WORDS_MAX)
				request->fds[request->fd_count++] = fd;
			else
				close(fd);
		}
	}
}

/* Serves one packet; false when the client is gone or sends what no client of ours would. */
static bool serve(int client)
{
	static char text[PACKET_BYTES + 1];
	union {
		char bytes[CMSG_SPACE(sizeof(int) * WORDS_MAX)];
		struct cmsghdr align;
	} control;
	struct iovec data = { .iov_base = text, .iov_len = PACKET_BYTES };
	struct msghdr message = {
		.msg_iov = &data,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	struct request request = { .fd_count = 0 };
	ssize_t got = recvmsg(client, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	char *rest, *word;
	bool whole;

	if (got < 0)
		return errno == EAGAIN || errno == EINTR;
	if (got == 0)
		return false;
	text[got] = 0;
	take_descriptors(&message, &request);
	whole = !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
	for (word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
		if (request.word_count > WORDS_MAX) {
			whole = false;
			break;
		}
		request.words[request.word_count++] = word;
	}
	if (whole && request.word_count)
		obey(client, &request);
	else
		answer(client, "bad packet", NULL, 0);
	for (int i = 0; i < request.fd_count; i++)
		if (request.fds[i] >= 0)
			close(request.fds[i]);
	return true;
}

static void welcome(void)
{
	int client = accept4(polled[0].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct ucred peer;
	socklen_t length = sizeof(peer);

	if (client < 0) {
		/* Out of descriptors or memory: the backlog keeps the caller, who asks again. */
		if (errno != ECONNABORTED && errno != EINTR && errno != EAGAIN)
			poll(NULL, 0, 100);
		return;
	}
	if (getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0 ||
	    peer.uid != geteuid()) {
		answer(client, "bad user", NULL, 0);
		close(client);
	} else if (polled_count > CLIENTS_MAX) {
		answer(client, "bad too many clients", NULL, 0);
		close(client);
	} else {
		polled[polled_count].events = POLLIN;
		polled[polled_count].revents = 0;
		polled[polled_count++].fd = client;
	}
}

static void keep(void)
{
	for (;;) {
		if (poll(polled, (nfds_t)polled_count, -1) < 0)
			continue;
		for (int i = polled_count - 1; i > 0; i--) {
			if (!polled[i].revents || serve(polled[i].fd))
				continue;
			close(polled[i].fd);
			polled[i] = polled[--polled_count];
		}
		if (polled[0].revents)
			welcome();
	}
}

int main(int argc, char **argv)
{
	const char *cgroup = NULL;
	bool foreground = false;
	int i, ret;

	for (i = 1; i < argc && argv[i][0] == '-'; i++) {
		if (!strcmp(argv[i], "--foreground"))
			foreground = true;
		else if (!strcmp(argv[i], "--cgroup") && i + 1 < argc && good_name(argv[i + 1]))
			cgroup = argv[++i];
		else
			break;
	}
	if (i != argc - 1 || argv[i][0] != '/') {
		fprintf(stderr, "usage: ember-keeper [--foreground] [--cgroup NAME] /PATH/SOCKET\n");
		return EXIT_USAGE;
	}
	close_range(3, ~0u, 0); /* whatever the starter forgot to close */
	ret = keeper_listen(argv[i], CLIENTS_MAX, &polled[0].fd);
	if (!ret && !foreground)
		ret = keeper_go_background();
	if (ret)
		return ret;
	polled[0].events = POLLIN;
	listen(polled[0].fd, CLIENTS_MAX); /* once more: whoever connects is told this pid */
	settled = keeper_settle_in(cgroup);
	if (!foreground)
		keeper_close_stdio();
	keep();
}
