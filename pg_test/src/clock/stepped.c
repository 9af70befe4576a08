/*
 * Loaded before the C library, it adds to the real time as many seconds as the first eight bytes of the file
 * STEPPED_CLOCK say. The monotonic clock stays right, as on a real machine. So do, unlike there, the times of files:
 * do not test on it what compares one with the real time (imported snapshots).
 *
 * Not libfaketime: to follow a file it opens it at each reading, which allocates memory. PostgreSQL reads the clock in
 * signal handlers too, and where one interrupts malloc, memory is corrupted ("corrupted double-linked list"; a loop of
 * short statement timeouts shows it within a second). Here nothing is done at a reading that a handler may not do.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none = 0;
/* Other libraries' constructors may read the clock before ours has run. */
static const int64_t *step = &none;

__attribute__((constructor)) static void follow(void)
{
	const char *name = getenv("STEPPED_CLOCK");
	int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
	void *there = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);

	if (there == MAP_FAILED)
	{
		perror("the stepped clock cannot be read");
		abort();
	}
	close(file);
	step = there;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int failed = syscall(SYS_clock_gettime, clock, now);

	if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += __atomic_load_n(step, __ATOMIC_RELAXED);
	return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec precise;

	(void) zone;
	clock_gettime(CLOCK_REALTIME, &precise);
	now->tv_sec = precise.tv_sec;
	now->tv_usec = precise.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *copy)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (copy)
		*copy = now.tv_sec;
	return now.tv_sec;
}
