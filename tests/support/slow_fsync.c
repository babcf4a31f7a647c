/* Preloaded into ranks by the soak: each fsync takes up to SLOW_FSYNC_MS milliseconds longer, as on a busy storage. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

static void dawdle(void) {
    const char *most = getenv("SLOW_FSYNC_MS");
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long ms = most && atol(most) > 0 ? (now.tv_nsec / 1000) % atol(most) : 0;
    struct timespec pause = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&pause, NULL);
}

int fsync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    dawdle();
    return real(fd);
}
