// Package zebuembed has the program zebu in it, for programs that are handed on as one file:
//
//	disk, err := zebu.Open(ctx, "disk.qcow2", zebuembed.Program())
//
// The program is written once into the user's cache directory, under the hash of its bytes, and compared with them before each use. It is
// there for Linux on amd64 and arm64; elsewhere, the option is an error.
package zebuembed

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	zebu "example.org/zebu/bindings/go"
)

// errNone says that there is no program for this system.
var errNone = errors.New("zebuembed has no program for this system")

// hash is that of the program's bytes, in digits.
var hash = sync.OnceValue(func() string {
	sum := sha256.Sum256(program)
	return hex.EncodeToString(sum[:])
})

// Program has the package zebu use the program that is embedded here.
func Program() zebu.Option { return zebu.ProgramFrom(Path) }

// Path writes the program into the cache directory of the user, unless it is there, and returns its path.
func Path() (string, error) {
	if len(program) == 0 {
		return "", fmt.Errorf("%w: %w", zebu.ErrNoProgram, errNone)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "zebu", hash())
	path := filepath.Join(dir, "zebu")
	if found, err := os.ReadFile(path); err == nil && bytes.Equal(found, program) {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return path, write(dir, path)
}

// write makes the file whole, or not at all: others may run it, or write it, at the same time.
func write(dir, path string) error {
	// A child that is started meanwhile would have the file open for writing, so that it could not be run.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	file, err := os.CreateTemp(dir, ".zebu-")
	if err != nil {
		return err
	}
	_, err = file.Write(program)
	err = errors.Join(err, file.Chmod(0o700), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}
