/* Faults that no signal can make: power loss, a full or slow disk, a clock that steps, a suspended machine. Preloaded
   into one process.

   FAULT_CONTROL names a file of four 64-bit numbers, shared with the test: how far the wall clock is off (ms), whether
   the disk is full, how long an fsync takes (ms; as on a real disk, writes wait for it), and how long the machine was
   suspended (ms; the test stops the process meanwhile): CLOCK_MONOTONIC is that much behind, CLOCK_BOOTTIME is not.
   FAULT_SYNCED names a log: "inode size" for everything that fsync has made durable, so that the test can drop the rest
   of each file, as a power loss does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *control;
static int synced = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_CONTROL");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *at = mmap(NULL, 4 * sizeof *control, PROT_READ, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) control = at;
        close(file);
    }
    path = getenv("FAULT_SYNCED");
    if (path) synced = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int64_t off_ms(void) { return control ? control[0] : 0; }
static int64_t slept_ms(void) { return control ? control[3] : 0; }

static int is_full(int file) {
    struct stat at;
    return control && control[1] && fstat(file, &at) == 0 && S_ISREG(at.st_mode);
}

/* -- the disk -- */

static volatile int syncing; /* fsyncs that are being delayed */

static void delay(void) {
    __sync_fetch_and_add(&syncing, 1);
    usleep((useconds_t)control[2] * 1000);
    __sync_fetch_and_sub(&syncing, 1);
}

static int sync_with(int (*real)(int), int file) {
    struct stat before;
    int known = synced >= 0 && fstat(file, &before) == 0 && S_ISREG(before.st_mode); /* what came later may be lost */
    if (control && control[2]) delay();
    int done = real(file);
    if (known && done == 0) {
        char line[64];
        int size = snprintf(line, sizeof line, "%llu %lld\n", (unsigned long long)before.st_ino, (long long)before.st_size);
        REAL(write)(synced, line, (size_t)size);
    }
    return done;
}

int fsync(int file) { return sync_with(REAL(fsync), file); }
int fdatasync(int file) { return sync_with(REAL(fdatasync), file); }

ssize_t write(int file, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = REAL(write);
    if (control && control[1] && is_full(file)) { errno = ENOSPC; return -1; }
    struct stat at;
    while (syncing && fstat(file, &at) == 0 && S_ISREG(at.st_mode)) usleep(1000);
    return real(file, data, size);
}

/* -- the clocks -- */

static void shift(struct timespec *at, int64_t ms) {
    at->tv_sec += ms / 1000;
    at->tv_nsec += ms % 1000 * 1000000;
    if (at->tv_nsec < 0) { at->tv_nsec += 1000000000; at->tv_sec--; }
    if (at->tv_nsec >= 1000000000) { at->tv_nsec -= 1000000000; at->tv_sec++; }
}

int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = REAL(clock_gettime);
    int done = real(which, now);
    if (done == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) shift(now, off_ms());
    if (done == 0 && (which == CLOCK_MONOTONIC || which == CLOCK_MONOTONIC_COARSE || which == CLOCK_MONOTONIC_RAW))
        shift(now, -slept_ms());
    return done;
}

/* how CPython's locks wait: until a moment of the clock above, which the kernel compares with its own */
int sem_clockwait(sem_t *lock, clockid_t which, const struct timespec *until) {
    struct timespec at = *until;
    if (which == CLOCK_MONOTONIC) shift(&at, slept_ms());
    return REAL(sem_clockwait)(lock, which, &at);
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
