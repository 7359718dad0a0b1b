package zebu

import "syscall"

// ofThisProgram has the kernel end a child when this program is gone, and keeps the keys of a terminal from it: Ctrl-C is for the
// program, which ends its disks as it likes.
func ofThisProgram() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}
