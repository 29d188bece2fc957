/*
 * The keeper under random packets: it answers each, keeps no descriptor it should not, and ends
 * cleanly. EMBER_KEEPER names the program of the same build, so the sanitizers watch it.
 */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define ROUNDS 4000
#define FDS_MAX 20

static struct sockaddr_un address = { .sun_family = AF_UNIX };

static pid_t start(void)
{
	const char *program = getenv("EMBER_KEEPER");
	pid_t child;

	CHECK(program != NULL);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		execl(program, program, "--foreground", address.sun_path, (char *)NULL);
		_exit(127);
	}
	return child;
}

static int join(void)
{
	struct timeval limit = { .tv_sec = 20 };
	int client = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK(client >= 0);
	CHECK_EQ(setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
	for (int i = 0; connect(client, (struct sockaddr *)&address, sizeof(address)) < 0; i++) {
		CHECK(errno == ENOENT || errno == ECONNREFUSED);
		CHECK(i < 2000);
		usleep(5000);
	}
	return client;
}

static void ask(int client, const void *packet, size_t length, int fd, int fd_count)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
		struct cmsghdr align;
	} control = { .bytes = { 0 } };
	struct iovec data = { .iov_base = (void *)(uintptr_t)packet, .iov_len = length };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };

	if (fd_count) {
		struct cmsghdr *header;

		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)fd_count);
		header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)fd_count);
		for (int i = 0; i < fd_count; i++)
			memcpy(CMSG_DATA(header) + (size_t)i * sizeof(int), &fd, sizeof(int));
	}
	CHECK_EQ(sendmsg(client, &message, MSG_NOSIGNAL), length);
}

/* The answer's text; descriptors in it are closed by the kernel, as nobody takes them. */
static const char *answered(int client)
{
	static char text[8193];
	ssize_t got = recv(client, text, sizeof(text) - 1, 0);

	CHECK(got > 0);
	text[got] = 0;
	return text;
}

static const char *told(int client, const char *request)
{
	ask(client, request, strlen(request), -1, 0);
	return answered(client);
}

static size_t random_packet(char *packet)
{
	static const char *words[] = { "put", "get", "list", "drop", "ping", "a", "b.c", "d-e", "f_g",
				       "/", "\xff", "", " ", "a", "put", "drop", "h", "i", "j", "\n" };
	size_t length = 0;

	if (random() % 8 == 0) { /* bytes */
		length = 1 + (size_t)random() % 9000;
		for (size_t i = 0; i < length; i++)
			packet[i] = (char)random();
		return length;
	}
	for (long i = random() % 24; i >= 0; i--) {
		const char *word = words[(size_t)random() % (sizeof(words) / sizeof(*words))];

		length += (size_t)sprintf(packet + length, "%s ", word);
	}
	return length;
}

static int held(pid_t pid)
{
	char path[64];
	int count = 0;
	DIR *directory;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	directory = opendir(path);
	CHECK(directory != NULL);
	while (readdir(directory))
		count++;
	closedir(directory);
	return count;
}

int main(void)
{
	char directory[] = "/tmp/ember-keeper-c-XXXXXX", packet[10000], path[160];
	int client, status, before;
	pid_t keeper;

	alarm(100);
	CHECK(mkdtemp(directory) != NULL);
	snprintf(address.sun_path, sizeof(address.sun_path), "%s/k.sock", directory);
	keeper = start();
	client = join();
	CHECK(!strncmp(told(client, "ping"), "ok ", 3));
	before = held(keeper);
	srandom(11);
	for (int i = 0; i < ROUNDS; i++) {
		int other = random() % 4 ? client : join();
		size_t length = random_packet(packet);

		ask(other, packet, length, client, (int)(random() % (FDS_MAX + 1)));
		if (other != client && random() % 2) { /* gone without reading the answer */
			close(other);
			continue;
		}
		CHECK(strlen(answered(other)) > 0);
		if (other != client)
			close(other);
	}
	CHECK(!strcmp(told(client, "drop a b.c d-e f_g h i j put get list drop ping"), "ok"));
	CHECK(!strcmp(told(client, "list"), "ok"));
	for (int i = 0; held(keeper) != before && i < 1000; i++)
		usleep(1000);
	CHECK_EQ(held(keeper), before);
	CHECK_EQ(kill(keeper, SIGTERM), 0);
	CHECK(!strcmp(told(client, "quit"), "ok"));
	CHECK_EQ(waitpid(keeper, &status, 0), keeper);
	CHECK(WIFEXITED(status));
	CHECK_EQ(WEXITSTATUS(status), 0);
	close(client);
	unlink(address.sun_path);
	snprintf(path, sizeof(path), "%s.lock", address.sun_path);
	CHECK_EQ(unlink(path), 0);
	CHECK_EQ(rmdir(directory), 0);
	return 0;
}
