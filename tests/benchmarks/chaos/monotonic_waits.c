/* Waits by the monotonic clock, given back to the C library: libfaketime 0.9.10 reads their deadlines as times of day, so that
   they end at once or fail even while it leaves that clock alone. Loaded in front of libfaketime. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

typedef int sleep_function(clockid_t, int, const struct timespec *, struct timespec *);
typedef int wait_function(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static sleep_function *real_sleep, *faked_sleep;
static wait_function *real_wait, *faked_wait;

__attribute__((constructor)) static void find_functions(void)
{
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    real_sleep = (sleep_function *)dlsym(libc, "clock_nanosleep");
    faked_sleep = (sleep_function *)dlsym(RTLD_NEXT, "clock_nanosleep");
    real_wait = (wait_function *)dlsym(libc, "pthread_cond_timedwait");
    faked_wait = (wait_function *)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *left)
{
    return (clock == CLOCK_REALTIME ? faked_sleep : real_sleep)(clock, flags, request, left);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline)
{
    /* A condition does not tell its clock; but no machine has run for the 31 years that every time of day exceeds. */
    wait_function *wait = deadline->tv_sec < 1000000000 ? real_wait : faked_wait;
    return wait(condition, mutex, deadline);
}
