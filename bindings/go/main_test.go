package zebu_test

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestMain runs the tests, and sees that they leave no process, no goroutine and no directory of sockets behind. It can also play a program
// zebu of another version.
func TestMain(m *testing.M) {
	if said := os.Getenv("ZEBU_TEST_PLAYS"); said != "" && len(os.Args) > 1 && os.Args[1] == "serve" {
		play(said)
	}
	if os.Getenv("ZEBU_TEST_OPENS") != "" {
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "go-")
	if err != nil {
		panic(err)
	}
	os.Setenv("TMPDIR", dir)
	before := runtime.NumGoroutine()
	code := m.Run()
	if code == 0 {
		if left := leftovers(dir, before); left != "" {
			fmt.Println("left behind:", left)
			code = 1
		}
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// leftovers waits until nothing is left, and says what is left after minutes.
func leftovers(dir string, goroutines int) string {
	left := ""
	for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		left = ""
		if found := children(); len(found) > 0 {
			left = fmt.Sprint("processes ", found)
		}
		if found, _ := filepath.Glob(filepath.Join(dir, "*")); len(found) > 0 {
			left += fmt.Sprint(" directories ", found)
		}
		if runtime.NumGoroutine() > goroutines {
			var all bytes.Buffer
			pprof.Lookup("goroutine").WriteTo(&all, 1)
			left += " goroutines " + all.String()
		}
		if left == "" {
			break
		}
	}
	return left
}

// children are the processes that this one has started and that are still there.
func children() []int {
	var found []int
	all, _ := filepath.Glob("/proc/self/task/*/children")
	for _, name := range all {
		text, _ := os.ReadFile(name)
		for _, word := range strings.Fields(string(text)) {
			number, _ := strconv.Atoi(word)
			found = append(found, number)
		}
	}
	return found
}

// play serves nothing but a control socket, which answers as it is told.
func play(said string) {
	for number, argument := range os.Args {
		if argument != "--control" {
			continue
		}
		listens, err := net.Listen("unix", os.Args[number+1])
		if err != nil {
			panic(err)
		}
		fmt.Println("ready")
		for {
			conn, err := listens.Accept()
			if err != nil {
				panic(err)
			}
			bufio.NewReader(conn).ReadBytes('\n')
			conn.Write([]byte(said + "\n"))
			conn.Close()
		}
	}
	os.Exit(1)
}
