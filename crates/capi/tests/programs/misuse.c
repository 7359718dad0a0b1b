/* misuse DIR AIO: what is forbidden by mistake, and is to end in an error; jobs and their callbacks. */
#include "expect.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 8 << 20 };

static char image[4096], copy[4096];
static zebu_disk *disk;
static zebu_queue *queue;
static char block[4096];
static const char *aio;

/* Options, with that of the engine. They last until the next ones. */
static const char *with(const char *words)
{
	static char options[128];
	snprintf(options, sizeof options, "%s,aio=%s", words, aio);
	return options;
}

static void refuses_nonsense(void)
{
	EXPECT(zebu_open(NULL, NULL) == NULL && errno == EINVAL && strstr(zebu_error(), "NULL"));
	EXPECT(zebu_open("", NULL) == NULL && errno == EINVAL);
	EXPECT(zebu_open(image, "rw,nonsense=1") == NULL && errno == EINVAL && strstr(zebu_error(), "nonsense"));
	EXPECT(zebu_open(image, "\xff") == NULL && errno == EINVAL);
	EXPECT(zebu_open("/nowhere/disk", with("ro")) == NULL && errno == ENOENT && strstr(zebu_error(), "/nowhere/disk"));
	EXPECT(zebu_create("https://host/disk", 1 << 20, NULL) == -ENOTSUP);
	EXPECT(zebu_open("nbd://127.0.0.1:1/disk", with("ro")) == NULL && errno == ECONNREFUSED);
	EXPECT(zebu_create(image, SIZE, NULL) == -EINVAL && strstr(zebu_error(), "format"));
	EXPECT(zebu_create(NULL, SIZE, "format=qcow2") == -EINVAL);
	EXPECT(zebu_pread(NULL, block, 1, 0) == -EBADF);
	EXPECT(zebu_pread((zebu_disk *)block, block, 1, 0) == -EBADF);
	EXPECT(zebu_size(NULL) == -EBADF && zebu_flush(NULL) == -EBADF);
	EXPECT(zebu_queue_new(NULL, NULL) == NULL && errno == EBADF);
	EXPECT(zebu_close(NULL) == 0 && zebu_queue_free(NULL) == 0);
	EXPECT(zebu_pread(disk, NULL, 1, 0) == -EINVAL && zebu_pread(disk, NULL, 0, 0) == 0);
	EXPECT(zebu_pread(disk, block, SIZE_MAX, 0) == -EINVAL);
	EXPECT(zebu_pread(disk, block, 2, SIZE - 1) == -EINVAL && zebu_pread(disk, block, 1, UINT64_MAX) == -EINVAL);
	EXPECT(zebu_pwrite(disk, block, 1, 0, 2) == -EINVAL && strstr(zebu_error(), "flags"));
	EXPECT(zebu_discard(disk, 0, UINT64_MAX) == -EINVAL);
	zebu_disk *reader = zebu_open(image, with("ro,locks=off"));
	EXPECT(reader && zebu_pwrite(reader, block, 1, 0, 0) == -EACCES && zebu_close(reader) == 0);
}

static void *on_another_thread(void *nothing)
{
	struct zebu_completion done;
	EXPECT(*zebu_error() == '\0');
	EXPECT(zebu_queue_flush(queue, 1) == -EBADF && zebu_queue_poll(queue, &done, 1, 0) == -EBADF);
	EXPECT(zebu_queue_free(queue) == -EBADF && strstr(zebu_error(), "thread"));
	/* A queue that its thread leaves behind ends with the thread. */
	zebu_queue *left = zebu_queue_new(disk, with("depth=8"));
	EXPECT(left && zebu_queue_fd(left) >= 0 && zebu_queue_write(left, block, sizeof block, 0, 1, 0) == 0 && zebu_queue_start(left) == 0);
	return nothing;
}

static void refuses_nonsense_of_queues(void)
{
	struct zebu_completion done[2];
	EXPECT(zebu_queue_new(disk, "rw") == NULL && errno == EINVAL);
	queue = zebu_queue_new(disk, with("depth=8"));
	EXPECT(queue != NULL);
	EXPECT(zebu_queue_poll(queue, NULL, 1, 0) == -EINVAL && zebu_queue_poll(queue, done, 0, 0) == -EINVAL);
	EXPECT(zebu_queue_poll(queue, done, -1, 0) == -EINVAL && zebu_queue_poll(queue, done, 2, -1) == 0);
	EXPECT(zebu_queue_readv(queue, NULL, 1, 0, 1) == -EINVAL && zebu_queue_readv(queue, NULL, -1, 0, 1) == -EINVAL);
	EXPECT(zebu_queue_read(queue, NULL, 1, 0, 1) == -EINVAL && zebu_queue_write(queue, block, 1, 0, 1, 8) == -EINVAL);
	EXPECT(zebu_queue_pending(queue) == 0);
	EXPECT(fcntl(zebu_queue_fd(queue), F_GETFL) & O_NONBLOCK);
	EXPECT(zebu_queue_read(queue, block, 2, SIZE - 1, 7) == 0 && zebu_queue_pending(queue) == 1);
	EXPECT(zebu_queue_poll(queue, done, 2, -1) == 1 && done[0].user_data == 7);
	EXPECT(done[0].result == -EINVAL && strstr(done[0].error, image));
	pthread_t thread;
	EXPECT(pthread_create(&thread, NULL, on_another_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

static void refuses_a_child(void)
{
	pid_t child = fork();
	EXPECT(child >= 0);
	if (child == 0) {
		struct zebu_completion done;
		EXPECT(zebu_pread(disk, block, 1, 0) == -EBADF && strstr(zebu_error(), "fork"));
		EXPECT(zebu_queue_flush(queue, 1) == -EBADF && zebu_queue_poll(queue, &done, 1, -1) == -EBADF);
		EXPECT(zebu_queue_free(queue) == -EBADF && zebu_close(disk) == -EBADF);
		zebu_disk *own = zebu_open(image, with("ro,locks=off"));
		EXPECT(own && own != disk && zebu_pread(own, block, sizeof block, 0) == 0 && zebu_close(own) == 0);
		/* What is the parent's stays in memory, which no checker of leaks is to mourn. */
		execl("/bin/true", "true", (char *)NULL);
		_exit(1);
	}
	int status;
	EXPECT(waitpid(child, &status, 0) == child && status == 0);
	EXPECT(zebu_pread(disk, block, sizeof block, 0) == 0);
}

static void knows_what_was_closed(void)
{
	struct zebu_completion done;
	zebu_queue *freed = zebu_queue_new(disk, with("depth=8"));
	EXPECT(freed && zebu_queue_free(freed) == 0 && zebu_queue_free(freed) == -EBADF && zebu_queue_fd(freed) == -EBADF);
	EXPECT(zebu_close(disk) == 0);
	EXPECT(zebu_close(disk) == -EBADF && zebu_size(disk) == -EBADF && zebu_pread(disk, block, 1, 0) == -EBADF);
	EXPECT(zebu_queue_read(queue, block, 1, 0, 5) == 0);
	EXPECT(zebu_queue_poll(queue, &done, 1, -1) == 1 && done.user_data == 5 && done.result < 0 && done.error);
	EXPECT(zebu_queue_free(queue) == 0);
}

struct calls {
	unsigned count, until;
	uint64_t done, total;
};

static int progress(void *user_data, uint64_t done, uint64_t total)
{
	struct calls *calls = user_data;
	EXPECT(done <= total);
	calls->count++;
	calls->done = done;
	calls->total = total;
	return calls->count == calls->until;
}

static void does_jobs(void)
{
	struct calls calls = {0}, cancels = {.until = 1};
	struct zebu_check_counts counts;
	EXPECT(zebu_convert(image, "rw", copy, "format=raw", NULL, NULL) == -EINVAL);
	EXPECT(zebu_convert(image, NULL, copy, NULL, NULL, NULL) == -EINVAL);
	EXPECT(zebu_convert(image, NULL, NULL, "format=raw", NULL, NULL) == -EINVAL);
	EXPECT(zebu_convert(image, with("ro"), image, "format=raw", NULL, NULL) < 0);
	EXPECT(zebu_convert(image, with("ro"), copy, "format=qcow2", progress, &cancels) == -ECANCELED);
	EXPECT(cancels.count == 1 && access(copy, F_OK) != 0);
	EXPECT(zebu_convert(image, with("format=qcow2"), copy, "format=qcow2,compress=on", progress, &calls) == 0);
	EXPECT(calls.count > 1 && calls.done == calls.total && calls.total == SIZE);
	EXPECT(zebu_check(copy, NULL, &counts, sizeof counts - 1, NULL, NULL) == -EINVAL);
	EXPECT(zebu_check(copy, "repair=some", &counts, sizeof counts, NULL, NULL) == -EINVAL);
	memset(&counts, 0xff, sizeof counts);
	EXPECT(zebu_check(copy, with("repair=none"), &counts, sizeof counts, progress, &calls) == 0);
	EXPECT(counts.corruptions == 0 && counts.leaks == 0 && counts.check_errors == 0);
	EXPECT(zebu_check(copy, with("repair=none"), NULL, 0, NULL, NULL) == 0);
	cancels = (struct calls){.until = 1};
	EXPECT(zebu_check(copy, with("repair=none"), NULL, 0, progress, &cancels) == -ECANCELED);
}

int main(int argc, char **argv)
{
	EXPECT(argc == 3);
	aio = argv[2];
	EXPECT(zebu_version_number() >= ZEBU_VERSION_NUMBER && *zebu_version() && *zebu_error() == '\0');
	snprintf(image, sizeof image, "%s/misuse.qcow2", argv[1]);
	snprintf(copy, sizeof copy, "%s/copy.qcow2", argv[1]);
	EXPECT(zebu_create(image, SIZE, with("format=qcow2")) == 0);
	disk = zebu_open(image, with("rw,format=qcow2"));
	EXPECT(disk != NULL);
	memset(block, 0x5a, sizeof block);
	EXPECT(zebu_pwrite(disk, block, sizeof block, 1 << 20, ZEBU_FUA) == 0);
	refuses_nonsense();
	refuses_nonsense_of_queues();
	refuses_a_child();
	knows_what_was_closed();
	does_jobs();
	return 0;
}
