//go:build !linux

package zebu

import "syscall"

// ofThisProgram has nothing to offer here. A server that was opened as a disk still ends when its client is gone.
func ofThisProgram() *syscall.SysProcAttr { return nil }
