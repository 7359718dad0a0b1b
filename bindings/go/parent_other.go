//go:build !linux

package zebu

import "syscall"

// diesWithParent has nothing to offer here. A server still ends when its last client is gone.
func diesWithParent() *syscall.SysProcAttr { return nil }
