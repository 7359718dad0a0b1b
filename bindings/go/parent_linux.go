package zebu

import "syscall"

// diesWithParent has the kernel end a child when this program is gone.
func diesWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
}
