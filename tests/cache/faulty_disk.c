/* Preloaded: writes, syncs and truncations of some files fail while a control file says so.
 *
 * FAULTY_DISK names the control file. Its lines are "write SUFFIX ERRNO", "sync SUFFIX ERRNO" or
 * "truncate SUFFIX ERRNO": calls for files whose name ends with SUFFIX fail with that number.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fault(const char *what, int fd) {
    const char *control = getenv("FAULTY_DISK");
    if (control == NULL || access(control, R_OK) != 0) return 0;
    char link[64], name[PATH_MAX], verb[32], suffix[256];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length <= 0) return 0;
    name[length] = 0;
    FILE *file = fopen(control, "r");
    if (file == NULL) return 0;
    int number, found = 0;
    while (!found && fscanf(file, "%31s %255s %d", verb, suffix, &number) == 3) {
        size_t ends = strlen(suffix);
        if (strcmp(verb, what) == 0 && (size_t)length >= ends && strcmp(name + length - ends, suffix) == 0)
            found = number;
    }
    fclose(file);
    if (found) {  /* for the test, which would otherwise not notice that nothing failed */
        char hits[PATH_MAX];
        snprintf(hits, sizeof hits, "%s.hits", control);
        if ((file = fopen(hits, "w")) != NULL) fclose(file);
    }
    return found;
}

#define FAIL(what, fd) do { int number = fault(what, fd); if (number) { errno = number; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "write");
    FAIL("write", fd);
    return real(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "pwrite64");
    FAIL("write", fd);
    return real(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

int fsync(int fd) {
    static int (*real)(int);
    if (real == NULL) real = dlsym(RTLD_NEXT, "fsync");
    FAIL("sync", fd);
    return real(fd);
}

int fdatasync(int fd) {
    static int (*real)(int);
    if (real == NULL) real = dlsym(RTLD_NEXT, "fdatasync");
    FAIL("sync", fd);
    return real(fd);
}

int ftruncate64(int fd, off64_t size) {
    static int (*real)(int, off64_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "ftruncate64");
    FAIL("truncate", fd);
    return real(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
