package zebu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
)

// Kinds of errors, for errors.Is.
var (
	// ErrNoProgram says that there is no program zebu.
	ErrNoProgram = errors.New("there is no program zebu")
	// ErrVersion says that the program speaks another version of the control socket than this package (see VersionError).
	ErrVersion = errors.New("zebu is of another version than this package")
	// ErrClosed says that a disk or a server is closed.
	ErrClosed = fmt.Errorf("the disk is closed: %w", os.ErrClosed)
	// ErrNotFound says that a file, an object, an export, a snapshot or a bitmap is not there. It is fs.ErrNotExist, too.
	ErrNotFound = fmt.Errorf("not found: %w", fs.ErrNotExist)
	// ErrExists says that a file would be replaced (Force allows it), or that a name is taken. It is fs.ErrExist, too.
	ErrExists = fmt.Errorf("it is there already: %w", fs.ErrExist)
	// ErrPermission says that the system, or a server, does not let this user do it. It is fs.ErrPermission, too.
	ErrPermission = fmt.Errorf("not permitted: %w", fs.ErrPermission)
	// ErrLocked says that another program uses the image.
	ErrLocked = errors.New("another program uses the image")
	// ErrReferenceRefused says that an image names a file which it may not name (AllowRefs).
	ErrReferenceRefused = errors.New("an image names a file that it may not name")
	// ErrReadOnly says that a disk was opened for reading only, or that nothing else is possible.
	ErrReadOnly = errors.New("the disk can only be read")
	// ErrNoSpace says that a file system or an image has no room. It is syscall.ENOSPC, too.
	ErrNoSpace = fmt.Errorf("no room: %w", syscall.ENOSPC)
	// ErrKey says that an encrypted image was opened without its key, or with another one.
	ErrKey = errors.New("the image is encrypted, and its key was not given")
	// ErrFormat says that a file is not of the format, is damaged, or is of one that can't be read, or checked.
	ErrFormat = errors.New("the file is no image of a format that can be read")
)

// Error is what zebu said when it failed. errors.Is finds its kind.
type Error struct {
	// Command is the command that failed, such as convert.
	Command string
	// Code is the exit code, or -1 if a signal ended it.
	Code int
	// Message is what it said on standard error, or on the control socket.
	Message string

	kind error
}

func newError(command string, code int, message string) *Error {
	return &Error{Command: command, Code: code, Message: message, kind: kindOf(message)}
}

func (e *Error) Error() string {
	if e.Message == "" {
		return fmt.Sprintf("zebu %s: exit code %d", e.Command, e.Code)
	}
	return e.Message
}

// Unwrap returns the kind, or nil if it is none of this package.
func (e *Error) Unwrap() error { return e.kind }

// kinds are words of zebu's messages, in the order in which they count: the remedy at the end of a message says more than what a
// file is called.
var kinds = []struct {
	kind  error
	words []string
}{
	{ErrReferenceRefused, []string{"--allow-refs"}},
	{ErrLocked, []string{"(stop that program first", "(try again when the disk has answered)"}},
	{ErrExists, []string{"replace it with --force", ": File exists"}},
	{ErrNoSpace, []string{"(free some space and try again)", ": No space left on device", "(ulimit -f"}},
	{ErrNotFound, []string{": No such file or directory", "there is no export", "no snapshot", "no bitmap"}},
	{ErrPermission, []string{": Permission denied", ": Operation not permitted"}},
	{ErrReadOnly, []string{"for reading only", "(zebu amend --unseal", ": Read-only file system"}},
	{ErrKey, []string{"key-secret", "passphrase"}},
	{ErrFormat, []string{"Image is not in ", "(-f raw)", "(zebu check -r", "does not support checks"}},
}

func kindOf(message string) error {
	for _, one := range kinds {
		for _, words := range one.words {
			if strings.Contains(message, words) {
				return one.kind
			}
		}
	}
	return nil
}

// VersionError says that the program speaks another version of the control socket. It is ErrVersion.
type VersionError struct {
	// Program is the path of the program.
	Program string
	// Version is that of the program, or empty if it does not tell.
	Version string
	// Control is the version of the control socket that it speaks, 0 if it does not tell.
	Control int
	// Reason is why it does not tell.
	Reason error
}

func (e *VersionError) Error() string {
	if e.Reason != nil {
		return fmt.Sprintf("'%s' does not tell its version, and this package is of zebu %s: %v", e.Program, Version, e.Reason)
	}
	return fmt.Sprintf("zebu %s ('%s') speaks version %d of the control socket, this package of zebu %s version %d: use those of one release",
		e.Version, e.Program, e.Control, Version, ControlVersion)
}

// Unwrap returns ErrVersion, and the reason.
func (e *VersionError) Unwrap() []error {
	if e.Reason != nil {
		return []error{ErrVersion, e.Reason}
	}
	return []error{ErrVersion}
}

// errnoOf translates an error number of NBD, which is that of Linux, into one of this system.
func errnoOf(code uint32) error {
	switch code {
	case 1:
		return syscall.EPERM
	case 5:
		return syscall.EIO
	case 12:
		return syscall.ENOMEM
	case 22:
		return syscall.EINVAL
	case 28:
		return ErrNoSpace
	case 75:
		return syscall.EOVERFLOW
	case 95:
		return syscall.ENOTSUP
	case 108:
		return syscall.ESHUTDOWN
	}
	return fmt.Errorf("error %d: %w", code, syscall.EIO)
}
