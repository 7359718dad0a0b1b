"""Processes: fork(), and interpreters that end with requests under way. Each case is a program of its own."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from conftest import MIB, left_sound, tool

# More than any of them takes, on a slow machine: what hangs is killed, and its stacks are printed.
LONGEST = 600


def program(text, *arguments):
    """Run a program of Python. Return its exit code and what it said."""
    words = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text), *map(str, arguments)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            said, _ = running.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGABRT)
            said, _ = running.communicate()
            pytest.fail(f"it hangs: {said}")
    return running.returncode, said


def test_a_child_has_nothing_of_its_parents_disk(image):
    code, said = program(
        """
        import os, sys, threading, zebu
        disk = zebu.open(sys.argv[1], "r+")
        extents = disk.extents()
        disk.pwrite(b"parent", 0)
        stop = threading.Event()
        def busy():
            into = bytearray(1 << 20)
            while not stop.is_set():
                disk.pread(into, 0)
        thread = threading.Thread(target=busy)
        thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                code = 0
                calls = [lambda: disk.pread(bytearray(10), 0), lambda: disk.pwrite(b"child", 0), disk.flush,
                         disk.info, lambda: disk.snapshots, lambda: disk.bitmaps, lambda: next(extents),
                         lambda: zebu.convert(disk, sys.argv[1] + ".copy")]
                for call in calls:
                    try:
                        call()
                        code = 1
                    except zebu.Error as error:
                        if "parent" not in str(error):
                            print(error)
                            code = 2
                # It may open its own.
                zebu.create(sys.argv[1] + f".{os.getpid()}", 1 << 20)
                with zebu.open(sys.argv[1] + f".{os.getpid()}", "r+") as own:
                    own.pwrite(b"own", 0)
                disk.close()
                # The end of the interpreter as usual, with what it does at exit.
                sys.exit(code)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
        stop.set()
        thread.join()
        assert disk.read_at(0, 6) == b"parent"
        disk.close()
        print("done")
        """,
        image,
    )
    assert code == 0 and said.endswith("done\n"), said
    left_sound(image)


def test_the_interpreter_ends_while_threads_read_and_write(image):
    """Threads that nobody waits for: the end must neither hang nor abort, and the image is sound."""
    for _ in range(5):
        code, said = program(
            """
            import sys, threading, zebu
            disk = zebu.open(sys.argv[1], "r+")
            begun = threading.Barrier(9)
            def work(number):
                into = bytearray(1 << (12 + number))
                begun.wait()
                while True:
                    disk.pread(into, 0)
                    disk.pwrite(into, 0)
            for number in range(8):
                threading.Thread(target=work, args=(number,), daemon=True).start()
            begun.wait()
            print("ends", flush=True)
            """,
            image,
        )
        assert code == 0 and said.startswith("ends\n"), said
        assert "Fatal" not in said, said
        left_sound(image)


def test_the_interpreter_ends_while_a_job_runs(tmp_path, image):
    """The job would take days."""
    code, said = program(
        """
        import sys, threading, zebu
        begun = threading.Event()
        def work():
            zebu.convert(sys.argv[1], sys.argv[2], compress=True, rate_limit=1, progress=lambda *_: begun.set())
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        print("ends", flush=True)
        """,
        image,
        tmp_path / "copy.qcow2",
    )
    assert code == 0 and said.startswith("ends\n"), said
    assert not (tmp_path / "copy.qcow2").exists()


def test_disks_that_are_open_at_the_end_are_closed(image):
    code, said = program(
        """
        import sys, zebu
        disk = zebu.open(sys.argv[1], "r+")
        disk.pwrite(b"kept", 0)
        """,
        image,
    )
    assert (code, said) == (0, "")
    left_sound(image)
    assert tool("qemu-io", "-f", "qcow2", "-c", "read -P 107 0 1", image)


def test_an_interrupted_task_stops_its_job(tmp_path, image):
    words = [
        sys.executable,
        "-c",
        textwrap.dedent(
            """
            import asyncio, sys, zebu
            def progress(*_):
                print("begun", flush=True)
            asyncio.run(zebu.aconvert(sys.argv[1], sys.argv[2], compress=True, rate_limit=1, progress=progress))
            """
        ),
        str(image),
        str(tmp_path / "copy.qcow2"),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "begun\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=LONGEST)
    assert running.returncode == -signal.SIGINT or "KeyboardInterrupt" in said, said
    assert not (tmp_path / "copy.qcow2").exists()


def test_a_killed_program_leaves_an_image_that_opens(image):
    words = [
        sys.executable,
        "-c",
        "import sys, zebu\n"
        "disk = zebu.open(sys.argv[1], 'r+')\n"
        "disk.pwrite(b'kept', 0)\n"
        "disk.flush()\n"
        "print('flushed', flush=True)\n"
        "while True: disk.pwrite(bytes(1 << 20), 1 << 20)\n",
        str(image),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "flushed\n"
        running.kill()
    import zebu

    with zebu.open(image, "r+") as disk:
        assert disk.read(4) == b"kept"
        assert disk.size == 8 * MIB
    assert zebu.check(image).corruptions == 0
    assert os.path.exists(image)
