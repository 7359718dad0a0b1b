/*
 * rounds DIR AIO ROUNDS: threads that write, read, zero and discard parts of one disk, half of them by calls that wait, half by queues
 * in an event loop. Leaves DIR/disk.qcow2, and in DIR/expected.raw what it is to hold.
 */
#include "expect.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum {
	THREADS = 4,
	CLUSTER = 65536,
	SLOT = 2 * CLUSTER,
	SLOTS = 8,
	PART = SLOTS * SLOT,
	GUARD = 600 * 1000, /* milliseconds: against hanging */
};

struct part {
	zebu_disk *disk;
	zebu_queue *queue;
	unsigned rounds;
	uint64_t begin, random;
	unsigned char *expected, *buffers;
};

static void fill(struct part *part, unsigned char *at, size_t len)
{
	uint32_t word = below(&part->random, 0x7fffffff);
	for (size_t i = 0; i < len; i++)
		at[i] = (unsigned char)(word >> (i % 4 * 8)) ^ (unsigned char)i;
}

static void *waits(void *of_thread)
{
	struct part *part = of_thread;
	unsigned char *data = part->buffers;
	for (unsigned round = 0; round < part->rounds; round++) {
		uint32_t at = below(&part->random, PART), len = below(&part->random, 3 * CLUSTER) + 1;
		if (len > PART - at)
			len = PART - at;
		switch (below(&part->random, 8)) {
		case 0: /* whole clusters: these read as zeroes then */
			at -= at % CLUSTER;
			EXPECT(zebu_discard(part->disk, part->begin + at, CLUSTER) == 0);
			memset(part->expected + at, 0, CLUSTER);
			break;
		case 1:
			EXPECT(zebu_write_zeroes(part->disk, part->begin + at, len, round % 2 ? ZEBU_KEEP : 0) == 0);
			memset(part->expected + at, 0, len);
			break;
		case 2:
			EXPECT(zebu_flush(part->disk) == 0);
			break;
		case 3:
		case 4:
			EXPECT(zebu_pread(part->disk, data, len, part->begin + at) == 0);
			EXPECT(memcmp(data, part->expected + at, len) == 0);
			break;
		default:
			fill(part, data, len);
			EXPECT(zebu_pwrite(part->disk, data, len, part->begin + at, round % 64 ? 0 : ZEBU_FUA) == 0);
			memcpy(part->expected + at, data, len);
		}
	}
	return NULL;
}

/* Waits for the completions of a batch, a few at a time, each once. */
static void complete(zebu_queue *queue, int epoll, unsigned round, unsigned count)
{
	unsigned seen = 0;
	for (unsigned ended = 0; ended < count;) {
		struct epoll_event event;
		int timeout = zebu_queue_timeout(queue);
		EXPECT(timeout >= -1);
		int ready = epoll_wait(epoll, &event, 1, timeout < 0 ? GUARD : timeout);
		/* The kernel interrupts a thread that waits to have it end requests of io_uring. */
		EXPECT(ready == 1 || (ready == 0 && timeout >= 0) || (ready < 0 && errno == EINTR));
		uint64_t signals;
		if (round % 2 && ready == 1)
			(void)!read(zebu_queue_fd(queue), &signals, sizeof signals);
		struct zebu_completion done[3];
		int found = zebu_queue_poll(queue, done, 3, 0);
		EXPECT(found >= 0 && found <= 3);
		for (int i = 0; i < found; i++) {
			EXPECT(done[i].result == 0 && done[i].error == NULL);
			EXPECT(done[i].user_data < count && !(seen & (1u << done[i].user_data)));
			seen |= 1u << done[i].user_data;
		}
		ended += (unsigned)found;
	}
	EXPECT(zebu_queue_pending(queue) == 0);
}

static void *polls(void *of_thread)
{
	struct part *part = of_thread;
	zebu_queue *queue = part->queue;
	int epoll = epoll_create1(0);
	struct epoll_event in = {.events = EPOLLIN};
	EXPECT(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, zebu_queue_fd(queue), &in) == 0);
	for (unsigned round = 0; round < part->rounds; round++) {
		/* What one batch wrote, the next one reads. */
		int reads = round % 2;
		unsigned count = 0;
		for (unsigned slot = 0; slot < SLOTS; slot++) {
			unsigned char *data = part->buffers + slot * SLOT, *expected = part->expected + slot * SLOT;
			uint64_t at = part->begin + slot * SLOT;
			if (reads) {
				memset(data, 0xee, SLOT);
				struct iovec iov[] = {{data, 1000}, {NULL, 0}, {data + 1000, SLOT - 1000}};
				EXPECT(zebu_queue_readv(queue, iov, 3, at, count++) == 0);
				continue;
			}
			uint32_t from = below(&part->random, SLOT), len = below(&part->random, SLOT - from) + 1;
			if (below(&part->random, 8) == 0) {
				memset(expected, 0, SLOT);
				EXPECT(zebu_queue_discard(queue, at, SLOT, count++) == 0);
			} else if (below(&part->random, 8) == 0) {
				memset(expected + from, 0, len);
				EXPECT(zebu_queue_write_zeroes(queue, at + from, len, count++, 0) == 0);
			} else {
				fill(part, data, len);
				memcpy(expected + from, data, len);
				EXPECT(zebu_queue_write(queue, data, len, at + from, count++, 0) == 0);
			}
		}
		if (round % 8 == 0)
			EXPECT(zebu_queue_flush(queue, count++) == 0);
		EXPECT(zebu_queue_start(queue) == 0);
		complete(queue, epoll, round, count);
		EXPECT(!reads || memcmp(part->buffers, part->expected, PART) == 0);
	}
	close(epoll);
	EXPECT(zebu_queue_free(queue) == 0);
	return NULL;
}

int main(int argc, char **argv)
{
	EXPECT(argc == 4);
	char image[4096], expected[4096], creation[64], options[64], queue_options[64];
	snprintf(image, sizeof image, "%s/disk.qcow2", argv[1]);
	snprintf(expected, sizeof expected, "%s/expected.raw", argv[1]);
	snprintf(creation, sizeof creation, "format=qcow2,aio=%s", argv[2]);
	snprintf(options, sizeof options, "rw,format=qcow2,aio=%s", argv[2]);
	snprintf(queue_options, sizeof queue_options, "depth=64,aio=%s", argv[2]);
	EXPECT(zebu_create(image, THREADS * PART, creation) == 0);
	zebu_disk *disk = zebu_open(image, options);
	EXPECT(disk != NULL && zebu_size(disk) == THREADS * PART);

	pthread_t threads[THREADS];
	struct part parts[THREADS];
	for (unsigned i = 0; i < THREADS; i++) {
		parts[i] = (struct part){
			.disk = disk,
			.rounds = (unsigned)atoi(argv[3]),
			.begin = i * PART,
			.random = i + 1,
			.expected = calloc(1, PART),
			.buffers = calloc(1, PART),
		};
		EXPECT(parts[i].expected && parts[i].buffers);
		if (i % 2)
			EXPECT((parts[i].queue = zebu_queue_new(disk, queue_options)) != NULL);
		EXPECT(pthread_create(&threads[i], NULL, i % 2 ? polls : waits, &parts[i]) == 0);
	}
	FILE *file = fopen(expected, "w");
	EXPECT(file != NULL);
	for (unsigned i = 0; i < THREADS; i++) {
		EXPECT(pthread_join(threads[i], NULL) == 0);
		EXPECT(fwrite(parts[i].expected, 1, PART, file) == PART);
		free(parts[i].expected);
		free(parts[i].buffers);
	}
	EXPECT(fclose(file) == 0);
	EXPECT(zebu_close(disk) == 0);
	return 0;
}
