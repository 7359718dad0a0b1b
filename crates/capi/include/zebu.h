/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Disk images for C: open one, read and write it, convert and check images.
 *
 * Functions that return an int return 0 or what they are asked for, and a negative errno after a failure. zebu_error() says
 * it in words. docs/guide/c.md has the rules: options, threads, fork(2), versions of the interface.
 */
#ifndef ZEBU_H
#define ZEBU_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. zebu_version_number() has that of the library, which is the same or a later one. */
#define ZEBU_VERSION_MAJOR 0
#define ZEBU_VERSION_MINOR 1
#define ZEBU_VERSION_PATCH 0
#define ZEBU_VERSION_NUMBER (ZEBU_VERSION_MAJOR * 1000000 + ZEBU_VERSION_MINOR * 1000 + ZEBU_VERSION_PATCH)

/*
 * An open disk. Any number of threads may use it at once. It is no address: a disk that was closed, one that was opened
 * before fork(2), and any other value are told from open disks. NULL is no disk. Both fail with -EBADF.
 */
typedef struct zebu_disk zebu_disk;

/*
 * Requests of one thread on a disk. A queue belongs to the first thread that does more with it than to ask for its descriptor; on
 * others, after zebu_queue_free(), and in a child of fork(2), functions fail with -EBADF. It ends with its thread.
 */
typedef struct zebu_queue zebu_queue;

/* Flags of zebu_pwrite(), zebu_queue_write() and zebu_queue_writev(). */
#define ZEBU_FUA 1u /* durable when the request has ended, without a flush */
/* Flags of zebu_write_zeroes() and zebu_queue_write_zeroes(). */
#define ZEBU_KEEP 1u /* the space stays allocated */

/* A request that has ended. */
struct zebu_completion {
	uint64_t user_data; /* as it was given with the request */
	const char *error;  /* the failure in words, NULL if there was none; until the next zebu_queue_poll() of the queue */
	int32_t result;     /* 0, or a negative errno */
	int32_t reserved;   /* 0 */
};

/* The result of zebu_check() in numbers. */
struct zebu_check_counts {
	uint64_t check_errors; /* parts of the image that could not be checked */
	uint64_t corruptions;  /* those that stand */
	uint64_t leaks;        /* those that stand */
	uint64_t corruptions_fixed;
	uint64_t leaks_fixed;
};

/*
 * Is told how far a job is: done of total, which begin again with each phase. A value other than 0 cancels the job. It may be
 * called on any thread, but never on two at once, and not after the function that it was given to has returned. It must
 * return: longjmp(3) out of it, and the end of its thread, are forbidden. An exception of C++ that leaves it aborts the process.
 */
typedef int (*zebu_progress)(void *user_data, uint64_t done, uint64_t total);

/* The version of the library: "0.1.0", and as ZEBU_VERSION_NUMBER is made. */
const char *zebu_version(void);
int zebu_version_number(void);

/*
 * The last failure of a function on this thread, in words; "" if there was none. The text lasts until the next function of
 * zebu on this thread. Never NULL.
 */
const char *zebu_error(void);

/*
 * Opens the file or block device `name`. `options` is NULL, or words with commas between them: "ro" (the default) or "rw",
 * and key=value. NULL, with errno set, after a failure.
 */
zebu_disk *zebu_open(const char *name, const char *options);

/*
 * Flushes and closes a disk, after what is under way on other threads; it is closed after a failure, too, but not after -EBUSY:
 * requests of a queue are under way that nobody drives. A disk is to be closed once. NULL is no failure.
 */
int zebu_close(zebu_disk *disk);

/* Bytes of the disk. */
int64_t zebu_size(zebu_disk *disk);

/*
 * Requests, which return when they are done. One is done whole or fails: 0, and no count of bytes. -EINVAL is also said of what
 * reaches past the end of the disk. Writes are durable after zebu_flush(). Discarded clusters read as zeroes, what is less than
 * a cluster stays as it is.
 */
int zebu_pread(zebu_disk *disk, void *buf, size_t len, uint64_t offset);
int zebu_pwrite(zebu_disk *disk, const void *buf, size_t len, uint64_t offset, uint32_t flags);
int zebu_write_zeroes(zebu_disk *disk, uint64_t offset, uint64_t len, uint32_t flags);
int zebu_discard(zebu_disk *disk, uint64_t offset, uint64_t len);
int zebu_flush(zebu_disk *disk);

/*
 * Makes a queue. It keeps the image open. `options` is NULL or words as of zebu_open(): depth, aio. NULL, with
 * errno set, after a failure.
 */
zebu_queue *zebu_queue_new(zebu_disk *disk, const char *options);

/* Waits for the requests under way and frees the queue; completions that were not polled are lost. NULL is no failure. */
int zebu_queue_free(zebu_queue *queue);

/*
 * A descriptor that is readable when zebu_queue_poll() has something to do. It belongs to the queue, is always the same, and does
 * not block. It may be read as an eventfd(2) is, or be left alone. Register it once, by level or by edge. poll(2) and epoll_wait(2)
 * may fail with EINTR without a signal, when io_uring has something for the thread: wait again.
 */
int zebu_queue_fd(zebu_queue *queue);

/*
 * Requests. Each is taken over, in any number, and starts with the next zebu_queue_start() or zebu_queue_poll(), together with the
 * others. The memory must stay as it is until the completion was polled or the queue freed; `iov` itself may go at once. `iovcnt` is
 * at most 1024. Requests may end in any order. A failure of these functions means that the request was not taken over.
 */
int zebu_queue_read(zebu_queue *queue, void *buf, size_t len, uint64_t offset, uint64_t user_data);
int zebu_queue_readv(zebu_queue *queue, const struct iovec *iov, int iovcnt, uint64_t offset, uint64_t user_data);
int zebu_queue_write(zebu_queue *queue, const void *buf, size_t len, uint64_t offset, uint64_t user_data, uint32_t flags);
int zebu_queue_writev(zebu_queue *queue, const struct iovec *iov, int iovcnt, uint64_t offset, uint64_t user_data,
                      uint32_t flags);
int zebu_queue_write_zeroes(zebu_queue *queue, uint64_t offset, uint64_t len, uint64_t user_data, uint32_t flags);
int zebu_queue_discard(zebu_queue *queue, uint64_t offset, uint64_t len, uint64_t user_data);
int zebu_queue_flush(zebu_queue *queue, uint64_t user_data);

/* Starts what was submitted. */
int zebu_queue_start(zebu_queue *queue);

/*
 * Stores up to `max` completions and returns how many they are; the descriptor stays readable while there are more. Waits for the
 * first one up to `timeout` milliseconds: not at all if it is 0, without end if it is negative, and never if nothing is under way.
 */
int zebu_queue_poll(zebu_queue *queue, struct zebu_completion *completions, int max, int timeout);

/* Requests that were submitted and whose completions were not polled yet. */
int64_t zebu_queue_pending(zebu_queue *queue);

/*
 * Milliseconds until zebu_queue_poll() has something to do although the descriptor is not readable; -1 if the descriptor tells. An
 * event loop takes it for its timeout.
 */
int zebu_queue_timeout(zebu_queue *queue);

/*
 * Makes an image of `size` bytes, over a file of that name if there is one. `options`: format, which is to be given,
 * cluster_size, preallocation, backing, backing_format, cache, aio.
 */
int zebu_create(const char *name, uint64_t size, const char *options);

/*
 * Makes the image `target` with the disk of `source`, which is opened with `source_options` as by zebu_open(). `target_options` are
 * those of zebu_create(), with compress in the place of aio: the source's holds for both. -ECANCELED if `progress` cancelled it in
 * time: nothing is left of a new target then.
 */
int zebu_convert(const char *source, const char *source_options, const char *target, const char *target_options,
                 zebu_progress progress, void *user_data);

/*
 * Checks an image: 0 if nothing is wrong, 1 if it was not wholly checked, 2 if it is corrupt, 3 if space is leaked. zebu_error() then
 * lists what was found. `options`: repair (none, leaks, all), cache, locks, aio. `counts` is NULL, or gets the numbers; `size` is
 * sizeof(struct zebu_check_counts).
 */
int zebu_check(const char *name, const char *options, struct zebu_check_counts *counts, size_t size,
               zebu_progress progress, void *user_data);

#ifdef __cplusplus
}
#endif

#endif
