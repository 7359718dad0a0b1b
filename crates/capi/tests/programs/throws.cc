// throws DIR: an exception that leaves a callback. The process is to be aborted.
#include "expect.h"
#include <csignal>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static int throws(void *, uint64_t, uint64_t)
{
	throw 1;
}

int main(int argc, char **argv)
{
	EXPECT(argc == 2);
	std::string image = std::string(argv[1]) + "/throws.qcow2";
	EXPECT(zebu_create(image.c_str(), 1 << 20, "format=qcow2") == 0);
	pid_t child = fork();
	EXPECT(child >= 0);
	if (child == 0) {
		struct rlimit none = {0, 0};
		setrlimit(RLIMIT_CORE, &none);
		zebu_check(image.c_str(), nullptr, nullptr, 0, throws, nullptr);
		_exit(0);
	}
	int status;
	EXPECT(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	return 0;
}
