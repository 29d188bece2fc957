/*
 * Where the keeper lives: its socket and its lock, its session and control group, what may end it.
 *
 * All of it is done once, before the first client is served; what cannot be had is said on stderr.
 */
#include "keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static int fail(const char *what, const char *path)
{
	fprintf(stderr, "ember-keeper: %s %s: %s\n", what, path, strerror(errno));
	return EXIT_SYSTEM;
}

/* The lock, not the socket, says that a keeper lives: a dead one's socket stays in the way. */
int keeper_listen(const char *path, int backlog, int *listening)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	char lock_path[sizeof(address.sun_path) + 8];
	int lock;

	if (strlen(path) >= sizeof(address.sun_path)) {
		errno = ENAMETOOLONG;
		return fail("cannot listen on", path);
	}
	strcpy(address.sun_path, path);
	snprintf(lock_path, sizeof(lock_path), "%s.lock", path);
	lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (lock < 0)
		return fail("cannot open", lock_path);
	if (flock(lock, LOCK_EX | LOCK_NB) < 0) {
		if (errno != EWOULDBLOCK)
			return fail("cannot lock", lock_path);
		fprintf(stderr, "ember-keeper: a keeper is running already, it holds %s\n",
			lock_path);
		return EXIT_RUNNING;
	}
	*listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (*listening < 0)
		return fail("cannot make a socket for", path);
	if (unlink(path) < 0 && errno != ENOENT)
		return fail("cannot remove the stale", path);
	umask(0077);
	if (bind(*listening, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    listen(*listening, backlog) < 0)
		return fail("cannot listen on", path);
	return 0;
}

static int write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC), error = 0;

	if (fd < 0)
		return errno;
	if (write(fd, text, strlen(text)) < 0)
		error = errno;
	close(fd);
	return error;
}

/*
 * Moves this process into a group of its own in every hierarchy that service managers follow:
 * the unified one and systemd's named one of version 1.
 */
static bool leave_cgroup(const char *name)
{
	FILE *mounts = fopen("/proc/self/mountinfo", "re");
	char line[4096], pid[16];
	bool left = false;

	snprintf(pid, sizeof(pid), "%d", getpid());
	while (mounts && fgets(line, sizeof(line), mounts)) {
		char root[1024], point[1024], path[2304];
		const char *tail = strstr(line, " - ");

		if (!tail || sscanf(line, "%*s %*s %*s %1023s %1023s", root, point) != 2)
			continue;
		if (strncmp(tail, " - cgroup2 ", 11) && !strstr(tail, "name=systemd"))
			continue;
		snprintf(path, sizeof(path), "%s/%s", point, name);
		if (mkdir(path, 0755) < 0 && errno != EEXIST)
			continue;
		snprintf(path, sizeof(path), "%s/%s/cgroup.procs", point, name);
		if (!write_text(path, pid))
			left = true;
	}
	if (mounts)
		fclose(mounts);
	if (!left)
		fprintf(stderr, "ember-keeper: cannot have a control group %s of its own: "
				"a service manager may kill it with the daemon\n", name);
	return left;
}

static int oom_score(void)
{
	FILE *file = fopen("/proc/self/oom_score_adj", "re");
	int score = 0;

	if (!file)
		return 0;
	if (fscanf(file, "%d", &score) != 1)
		score = 0;
	fclose(file);
	return score;
}

struct keeper_place keeper_settle_in(const char *cgroup)
{
	struct keeper_place place = { .own_cgroup = false };
	int error = write_text("/proc/self/oom_score_adj", "-1000");

	if (error)
		fprintf(stderr, "ember-keeper: cannot set its OOM score to -1000 (%s): under memory "
				"pressure the kernel may kill it\n", strerror(error));
	place.oom_score_adj = oom_score();
	if (cgroup)
		place.own_cgroup = leave_cgroup(cgroup);
	for (int number = 1; number <= SIGRTMAX; number++)
		if (number != SIGKILL && number != SIGSTOP && number != SIGSEGV &&
		    number != SIGBUS && number != SIGILL && number != SIGFPE && number != SIGABRT)
			signal(number, SIG_IGN);
	prctl(PR_SET_NAME, "ember-keeper");
	(void)!chdir("/");
	mlockall(MCL_CURRENT); /* a keeper must not wait for swap; where forbidden, it may */
	return place;
}

/* Leaves the starter's session; the starter's wait() ends when the socket is ready. */
int keeper_go_background(void)
{
	pid_t child = fork();

	if (child < 0)
		return fail("cannot fork", "");
	if (child > 0)
		_exit(0);
	setsid();
	child = fork();
	if (child < 0)
		return fail("cannot fork", "");
	if (child > 0)
		_exit(0);
	return 0;
}

void keeper_close_stdio(void)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (null < 0)
		return;
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	if (null > 2)
		close(null);
}
