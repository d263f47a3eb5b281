/* A server whose wall clock the simulation owns. Preloaded into the server process.

   CLOCK_CONTROL names a file of one 64-bit number, shared with the simulation: the time in microseconds since 1970.
   The monotonic clock is left alone: the server uses it only for its own housekeeping. The server ends with the
   process that has started it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *now_us;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_CONTROL");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    void *at = mmap(NULL, sizeof *now_us, PROT_READ, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) now_us = at;
    close(file);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "clock_gettime");
    if (now_us && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
        now->tv_sec = *now_us / 1000000;
        now->tv_nsec = *now_us % 1000000 * 1000;
        return 0;
    }
    return real(which, now);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec at;
    int done = clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return done;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}
